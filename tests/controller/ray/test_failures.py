"""Failures and hangs on a cluster: each error names the worker, the call and a fix, and leaves no process."""

import ctypes
import gc
import itertools
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend, RayResourcePool
from hybridflow.errors import (
    ConfigError,
    DispatchError,
    FieldError,
    HybridFlowError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from hybridflow.protocol import DataProto
from hybridflow.runtime.progress import note_progress

pytestmark = [
    pytest.mark.ray,
    pytest.mark.own_run("ray_two: its workers are killed, and py-spy looks at them"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc"),
]


def exhaustive(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def die(how):
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "os._exit":
        os._exit(3)
    if how == "segmentation fault":
        ctypes.string_at(0)
    if how == "SystemExit":
        raise SystemExit(3)


def meet():
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()


@contextmanager
def jumping_clock():
    """Let `time.time` of this process jump by a year, back and forth."""
    original, jumps = time.time, itertools.cycle([0, 1, -1])
    time.time = lambda: original() + next(jumps) * 365 * 86400.0
    try:
        yield
    finally:
        time.time = original


class Unlucky(Worker):
    def __init__(self, config=""):
        if self.rank == 1 and config.startswith("raise"):
            raise ValueError("no luck in the constructor")
        if config == "raise while rank 0 waits":
            meet()
        if self.rank == 1:
            die(config)
        self.num_calls = 0

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ALL_TO_ALL)
    def count_calls(self, value=None):
        self.num_calls += 1
        return self.num_calls

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("y",))
    def compute(self, batch, how="", seconds=0.0):
        time.sleep(seconds)
        x = batch.batch["x"]
        if how == "returns a number":
            return 7
        if how == "drops a row":
            return DataProto.from_dict({"y": x[1:]})
        if how == "returns z":
            return DataProto.from_dict({"z": x})
        if self.rank == 1 and how == "raises":
            raise ValueError("no luck")
        if self.rank == 1:
            die(how)
        return DataProto.from_dict({"y": x})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_undeclared(self, batch):
        return DataProto.from_dict({"y" if self.rank == 0 else "z": batch.batch["x"]})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("y",), writes=("z",))
    def pass_on(self, batch):
        return DataProto.from_dict({"z": batch.batch["y"]})

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, how):
        if self.rank == 1 and how == "a lock is returned":
            return threading.Lock()
        if self.rank == 1:
            die(how)
        return None

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def work(self, seconds, then_sleep_s=0.0):
        """Note progress twice a second, then sleep without progress."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.5)
            note_progress()
        time.sleep(then_sleep_s)
        return "done"

    @register(Dispatch.ONE_TO_ALL)
    def work_while_the_clock_jumps(self, seconds):
        with jumping_clock():
            return self.work(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def hold_the_lock(self, seconds):
        ctypes.PyDLL(None).sleep(seconds)
        return "done"

    @register(Dispatch.ONE_TO_ALL)
    def meet(self, rank_1_does=""):
        meet()
        if self.rank == 1:
            die(rank_1_does)
        torch.distributed.barrier()


def rows(num_rows=4):
    return DataProto.from_dict({"x": torch.arange(float(num_rows))})


@contextmanager
def running(backend):
    """Yield a function that starts groups of two ranks; shut them down and release their pools at the end."""
    pools, groups = [], []

    def start(name, config="", backend=backend):
        pools.append(RayResourcePool([2]))
        groups.append(WorkerGroup(pools[-1], ClassWithInitArgs(Unlucky, config=config), backend, name))
        return groups[-1]

    yield start
    for group in groups:
        group.shutdown()
    for pool in pools:
        pool.release()


@pytest.fixture
def start(ray_backend):
    """Yield `start("name", "how the constructor fails", backend=...)`; a test may destroy the groups it returns."""
    with running(ray_backend) as start:
        yield start


@pytest.fixture(scope="module")
def group(ray_backend):
    """Yield a group that every test must leave alive."""
    with running(ray_backend) as start:
        yield start("actor")


@pytest.fixture(scope="module")
def other(ray_backend):
    with running(ray_backend) as start:
        yield start("critic")


@pytest.fixture
def impatient(ray_backend):
    """Yield a second backend on the same cluster; a test shortens its deadline after it has started its groups."""
    with RayBackend(call_timeout_s=120) as backend:
        yield backend


# Pools and constructors


def test_a_pool_larger_than_the_cluster_is_an_error_without_a_wait(ray_backend, monkeypatch):
    from hybridflow.controller.ray import resource_pool

    monkeypatch.setattr(resource_pool, "SETTLING_S", 1e6)
    monkeypatch.setattr(resource_pool, "RESERVATION_TIMEOUT_S", 1e6)
    pool = RayResourcePool([1000])
    for attempt in (lambda: WorkerGroup(pool, ClassWithInitArgs(Unlucky), ray_backend), pool.places):
        with pytest.raises(ConfigError, match=r"the cluster has 1 node\(s\): \S+: .* of 64 CPU free"):
            attempt()
    with pytest.raises(ConfigError, match=r"process_on_nodes=\[40\].* does not fit the cluster"):
        ray_backend.check_fit([ResourcePool([30]), ResourcePool([40])])


@pytest.mark.parametrize("how", [exhaustive("raise"), "raise while rank 0 waits"])
def test_a_failing_constructor_on_one_rank_stops_all_ranks(start, ray_backend, how):
    before = list(ray_backend._processes)
    with pytest.raises(WorkerError) as caught:
        start("actor", how)
    error = caught.value
    assert str(error) == "Unlucky.__init__ failed on worker actor/1: ValueError: no luck in the constructor"
    assert (error.role, error.rank, bool(error.node)) == ("actor", 1, True)
    assert isinstance(error.__cause__, ValueError)
    assert "in __init__" in str(error.__cause__.__cause__)
    assert ray_backend._processes == before


@pytest.mark.parametrize("how", [exhaustive("SIGKILL"), exhaustive("os._exit"), "segmentation fault"])
def test_a_constructor_that_kills_its_process_is_a_worker_died_error(start, ray_backend, how):
    before = list(ray_backend._processes)
    with pytest.raises(WorkerDiedError) as caught:
        start("actor", how)
    error = caught.value
    assert str(error).startswith("worker actor/1 on node 127.0.0.1, pid ")
    assert "died before Unlucky.__init__ finished: " in str(error)
    assert (error.role, error.rank, error.node) == ("actor", 1, "127.0.0.1")
    assert ("Fatal Python error: Segmentation fault" in str(error)) == (how == "segmentation fault")
    assert ray_backend._processes == before


# Results, arguments and errors of methods


def test_errors_of_results_name_the_method_and_leave_the_group_alive(group):
    cases = [
        ("returns a number", DispatchError, r"returned int, but declares writes=\('y',\); return a DataProto"),
        ("drops a row", DispatchError, "returned 1 rows for 2, but declares 1 for each; correct rows=.* return 2 rows"),
        ("returns z", FieldError, r"returned z, but declares writes=\('y',\): missing y; not declared z"),
    ]
    for how, kind, says in cases:
        for call in (
            lambda how=how: group.compute(rows(), how),
            lambda how=how: group.compute.remote(rows(), how).get(),
        ):
            with pytest.raises(kind, match=rf"^Unlucky\.compute on rank \d {says}") as caught:
                call()
            assert "in Unlucky.compute, worker actor/" in caught.value.__notes__[0]
    for call in (group.compute_undeclared, lambda batch: group.compute_undeclared.remote(batch).get()):
        with pytest.raises(HybridFlowError, match=r"part 0 has \['y'\].* part 1 has \['z'\]") as caught:
            call(rows())
        assert caught.value.__notes__ == ["while collecting the results of Unlucky.compute_undeclared"]
    with pytest.raises(DispatchError, match=r"the result of Unlucky\.fail is a lock, which cannot be sent"):
        group.fail("a lock is returned")
    assert len(group.compute(rows())) == 4


def test_no_rank_is_called_if_one_argument_cannot_be_sent(group):
    before = group.count_calls()
    with pytest.raises(DispatchError, match=r"argument 0 of Unlucky.count_calls is a lock, which cannot be sent to "):
        group.count_calls([1, threading.Lock()])
    with pytest.raises(DispatchError, match=r"argument value of Unlucky.count_calls is a lock"):
        group.count_calls(value=threading.Lock())
    assert group.count_calls() == [count + 1 for count in before]


def test_an_unread_error_reaches_every_reader_but_no_other_call(group, other):
    future = group.compute.remote(rows(), "raises", seconds=0.3)
    passed_on = other.pass_on.remote(future)
    assert len(group.compute(rows())) == 4
    for read in (future.get, lambda: future.get("y"), passed_on.get):
        with pytest.raises(
            WorkerError, match=r"^Unlucky.compute failed on worker actor/1: ValueError: no luck"
        ) as caught:
            read()
        assert (caught.value.role, caught.value.rank) == ("actor", 1)
    group.compute.remote(rows(), "raises")  # the call is released with its future
    gc.collect()
    assert (len(group.compute(rows())), len(other.compute(rows()))) == (4, 4)


# Deaths


@pytest.mark.parametrize("how", ["SIGKILL", "SystemExit", exhaustive("os._exit"), exhaustive("segmentation fault")])
def test_a_death_in_a_call_raises_at_once_and_stops_the_group(start, wait_until_gone, how):
    doomed = start("actor")
    pids = doomed.pid()
    with pytest.raises(WorkerDiedError) as caught:
        doomed.compute(rows(), how, seconds=0.3)
    error = caught.value
    assert str(error).startswith(f"worker actor/1 on node 127.0.0.1, pid {pids[1]} died before Unlucky.compute ")
    assert (error.role, error.rank, error.node) == ("actor", 1, "127.0.0.1")
    assert f"-{pids[1]}.err" in str(error)
    says = {
        "segmentation fault": "Fatal Python error: Segmentation fault",
        "SIGKILL": "It exited without an error message; likely a signal",
        "SystemExit": "exit code 3",
    }
    assert says.get(how, "") in str(error)
    wait_until_gone(pids)
    assert not doomed.is_alive()
    with pytest.raises(WorkerError, match=r"worker actor/0 has exited \(worker actor/1 .* died before .*"):
        doomed.pid()
    doomed.shutdown()
    with pytest.raises(DispatchError, match=r"Unlucky.pid was called on .* shut down; create a new group"):
        doomed.pid()


def test_a_death_in_a_collective_is_raised_instead_of_its_consequences(start):
    doomed = start("actor")
    doomed.meet()
    with pytest.raises(WorkerDiedError) as caught:
        doomed.meet("SIGKILL")
    assert caught.value.rank == 1


@pytest.mark.parametrize("reads", ["before the death", exhaustive("at the death")])
def test_a_group_survives_the_death_of_the_group_that_it_reads_from(start, other, wait_until_gone, reads):
    doomed = start("actor")
    pids = doomed.pid()
    lost = doomed.compute.remote(rows(), "SIGKILL", seconds=0.5)
    if reads == "at the death":
        with pytest.raises(WorkerDiedError, match=rf"worker actor/1 .*pid {pids[1]} "):
            other.pass_on(lost)
    else:
        passed_on = other.pass_on.remote(lost)
        with pytest.raises(WorkerDiedError, match="worker actor/1"):
            lost.get()
        assert len(other.compute(rows(), seconds=1.0)) == 4  # a wait that is long enough to check other calls
        with pytest.raises(WorkerDiedError, match=rf"worker actor/1 .*pid {pids[1]} ") as caught:
            passed_on.get()
        assert (caught.value.role, caught.value.rank) == ("actor", 1)
    wait_until_gone(pids)  # rank 0 of the group may wait for it in a collective
    assert other.is_alive()
    assert len(other.compute(rows())) == 4
    with pytest.raises(WorkerError, match=r"has exited \(worker actor/1 on node"):
        doomed.pid()


def test_error_for_a_future_of_a_closed_group_names_the_shutdown(start):
    closed = start("actor")
    finished, unfinished = closed.pid.remote(), closed.sleep.remote(600)
    assert len(finished.get()) == 2
    closed.shutdown()
    assert len(finished.get()) == 2
    with pytest.raises(WorkerError, match="shut down"):
        unfinished.get()


# Deadlines


def test_deadline_error_names_the_chain_and_stops_only_late_workers(start, impatient, wait_until_gone):
    slow, waits = start("actor", backend=impatient), start("reference", backend=impatient)
    slow_pids, pids = slow.pid(), waits.pid()
    impatient.call_timeout_s = 2.0
    future = waits.pass_on.remote(slow.compute.remote(rows(), seconds=600.0))
    with pytest.raises(WorkerTimeoutError) as caught:
        future.get()
    error, text = caught.value, str(caught.value)
    assert text.startswith("Unlucky.compute on actor, rank ")
    assert "longer than its deadline of 2 s (controller.call_timeout_s)." in text
    assert "The controller waits for Unlucky.pass_on on reference/" in text
    assert f"actor/{error.rank}:\nProcess {slow_pids[error.rank]} on " in text
    assert " in Unlucky.compute\n" in text
    assert "in test_deadline_error_names_the_chain_and_stops_only_late_workers" in text
    wait_until_gone(slow_pids)
    impatient.call_timeout_s = 120
    assert waits.pid() == pids


@pytest.mark.exhaustive
def test_a_call_outlives_its_deadline_while_it_makes_progress(start, impatient):
    group = start("actor", backend=impatient)
    impatient.call_timeout_s = 8.0
    assert group.work(20) == ["done", "done"]
    with pytest.raises(WorkerTimeoutError) as caught:
        group.work(5, then_sleep_s=600)
    assert " s of them without progress, longer than its deadline of 8 s (controller.c" in str(caught.value)


# Heartbeats


def stored_keys():
    from ray.experimental import internal_kv

    return set(internal_kv._internal_kv_list("heartbeats/", namespace="hybridflow"))


@pytest.fixture
def watching(ray_backend):
    """Yield a second backend on the same cluster, which misses a heartbeat after 3 s."""
    with RayBackend(call_timeout_s=120, heartbeat_timeout_s=3.0) as backend:
        yield backend


def test_a_stopped_worker_is_noticed_by_its_missing_heartbeat(start, watching, wait_until, wait_until_gone):
    before = stored_keys()
    group = start("actor", backend=watching)
    pids = group.pid()
    wait_until(lambda: len(stored_keys() - before) == 2)
    with pytest.raises(WorkerTimeoutError) as caught:
        group.fail("SIGSTOP")
    error, text = caught.value, str(caught.value)
    assert text.startswith(f"worker actor/1 on node 127.0.0.1, pid {pids[1]} is stopped by a signal (T): it has not ")
    assert "while Unlucky.fail runs on it (limit: 3 s, controller.heartbeat_timeout_s=3)." in text
    assert "It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on." in text
    assert " in Unlucky.fail\n" in text
    assert (error.role, error.rank, error.node) == ("actor", 1, "127.0.0.1")
    wait_until_gone(pids)
    wait_until(lambda: stored_keys() <= before)


@pytest.mark.exhaustive
def test_a_worker_that_holds_the_interpreter_lock_is_not_lost(start, impatient, watching, caplog):
    group = start("actor", backend=watching)
    assert group.hold_the_lock(9) == ["done", "done"]  # three times the limit
    silent = [record.getMessage() for record in caplog.records if record.name.endswith("silence")]
    assert silent
    assert "it has not sent a heartbeat for" in silent[0]
    assert "it counts as lost after 30 s.\nProcess " in silent[0]
    assert start("critic", backend=impatient).hold_the_lock(5) == ["done", "done"]


@pytest.mark.exhaustive
def test_a_clock_that_jumps_changes_no_decision(start, ray_backend):
    with RayBackend(call_timeout_s=20.0, heartbeat_timeout_s=10.0, report_after_s=20.0) as backend:
        group = start("actor", backend=backend)
        with jumping_clock():
            assert group.work_while_the_clock_jumps(8) == ["done", "done"]


# Released resources, and the driver


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_plain", [True, False])
def test_an_unreferenced_pool_without_groups_is_released(ray_backend, wait_until, is_plain):
    import ray

    pool = ResourcePool([1]) if is_plain else RayResourcePool([1])
    group = WorkerGroup(pool, ClassWithInitArgs(Unlucky), ray_backend, "actor")
    (reserved,) = (ray_backend._own_pools[pool] if is_plain else pool)._groups
    group.shutdown()
    del pool, group
    gc.collect()
    wait_until(lambda: ray.util.placement_group_table(reserved)["state"] == "REMOVED")


def test_two_threads_call_two_groups_at_the_same_time(group, other):
    results, errors = {}, []

    def work(name, called):
        try:
            results[name] = [called.compute(rows(6)).batch["y"].tolist() for _ in range(20)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=item) for item in (("actor", group), ("critic", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert results == dict.fromkeys(("actor", "critic"), [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 20)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_exit_of_a_forked_child_does_not_affect_the_groups(group):
    pids = group.pid()
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert group.pid() == pids
