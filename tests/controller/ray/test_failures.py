"""Failures on a cluster: each error names the worker, the call and a fix, and leaves no process."""

import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.errors import (
    BatchError,
    ConfigError,
    DispatchError,
    FieldError,
    HybridFlowError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from hybridflow.protocol import DataProto

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")]


class CannotBeUnpickled(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class UnpicklableOutsideWorkers(Exception):
    def __reduce__(self):
        return rebuild_in_a_worker, ()


def rebuild_in_a_worker():
    if "RANK" not in os.environ:
        raise OSError("not a worker")
    return UnpicklableOutsideWorkers("of a worker")


class HasALock(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class HasNoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def die(how):
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "os._exit":
        os._exit(3)
    if how == "segmentation fault":
        ctypes.string_at(0)


def meet():
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()


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
        if how == "returns nothing":
            return None
        if how == "drops a row":
            return DataProto.from_dict({"y": x[1:]})
        if how == "returns z":
            return DataProto.from_dict({"z": x})
        if how == "returns z on rank 1":
            return DataProto.from_dict({"y" if self.rank == 0 else "z": x})
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

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("big",))
    def make_big(self, batch, mib_a_row):
        return DataProto.from_dict({"big": torch.ones(len(batch), mib_a_row * 2**18)})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("big",), writes=("sums",))
    def sum_big(self, batch):
        return DataProto.from_dict({"sums": batch.batch["big"].sum(1)})

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, how, seconds=0.0):
        time.sleep(seconds)
        if self.rank == 0:
            return None
        if how == "a lock is returned":
            return threading.Lock()
        errors = {
            "cannot be unpickled": lambda: CannotBeUnpickled(1, 2),
            "can be read by workers only": lambda: UnpicklableOutsideWorkers("of a worker"),
            "has a lock": HasALock,
            "has no text": HasNoText,
            "is huge": lambda: ValueError("h" * 5_000_000),
            "SystemExit": lambda: SystemExit(3),
            "KeyboardInterrupt": lambda: KeyboardInterrupt("by the test"),
        }
        if how in errors:
            raise errors[how]()
        die(how)
        return None

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def meet(self, rank_1_does=""):
        meet()
        if self.rank == 1 and rank_1_does == "raises":
            raise ValueError("rank 1 does not come")
        if self.rank == 1:
            die(rank_1_does)
        torch.distributed.barrier()


def rows(num_rows=4):
    return DataProto.from_dict({"x": torch.arange(float(num_rows))})


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until_gone(pids, timeout_s=100.0):
    end = time.monotonic() + timeout_s
    while left := [pid for pid in pids if not is_gone(pid)]:
        assert time.monotonic() < end, f"{left} are still there"
        time.sleep(0.05)


@contextmanager
def running(backend):
    """Yield a function that starts groups of two ranks; shut them down and release their pools at the end."""
    from hybridflow.controller.ray import RayResourcePool

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
    from hybridflow.controller.ray import RayResourcePool

    ray_backend.check_fit([RayResourcePool([1])])  # starts the cluster, before another backend does
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
    from hybridflow.controller.ray import RayBackend

    with RayBackend(call_timeout_s=120) as backend:
        yield backend


@pytest.fixture
def endless_wait(monkeypatch):
    """Let a pool wait for free resources without end, so that an error shows that it did not wait."""
    from hybridflow.controller.ray import resource_pool

    monkeypatch.setattr(resource_pool, "SETTLING_S", 1e6)
    monkeypatch.setattr(resource_pool, "RESERVATION_TIMEOUT_S", 1e6)


# ------------------------------------------------------------------------------------------ pools


@pytest.mark.usefixtures("endless_wait")
def test_a_pool_larger_than_the_cluster_is_an_error_without_a_wait(ray_backend):
    with pytest.raises(ConfigError) as caught:
        ray_backend.check_fit([ResourcePool([1000])])
    assert "requested [1000] processes on 1 node(s), each with 1 CPU" in str(caught.value)
    assert "the cluster has 1 node(s): 127.0.0.1: " in str(caught.value)
    assert " of 64 CPU free. Use fewer processes" in str(caught.value)
    with pytest.raises(ConfigError, match=r"requested \[1, 1\] processes"):
        ray_backend.check_fit([ResourcePool([1, 1])])


@pytest.mark.usefixtures("endless_wait")
def test_a_second_attempt_with_a_too_large_pool_gives_the_same_error(ray_backend):
    from hybridflow.controller.ray import RayResourcePool

    pool = RayResourcePool([1000])
    for _ in range(2):
        with pytest.raises(ConfigError, match="does not fit the cluster"):
            WorkerGroup(pool, ClassWithInitArgs(Unlucky), ray_backend)


@pytest.mark.usefixtures("endless_wait")
def test_pools_must_fit_the_cluster_together(ray_backend):
    ray_backend.check_fit([ResourcePool([20])])
    with pytest.raises(ConfigError, match=r"process_on_nodes=\[40\].* does not fit the cluster"):
        ray_backend.check_fit([ResourcePool([30]), ResourcePool([40])])


def test_error_for_an_occupied_cluster_names_free_cpus(ray_backend, group):
    from hybridflow.controller.ray import RayResourcePool

    pool = RayResourcePool([63], cpus_per_process=1.0)
    with pytest.raises(ConfigError) as caught:
        pool.places()
    assert " of 64 CPU free." in str(caught.value)
    assert "wait until other groups release resources" in str(caught.value)


# ------------------------------------------------------------------------------------------ constructors


@pytest.mark.parametrize("how", ["raise", "raise while rank 0 waits"])
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


@pytest.mark.parametrize("how", ["SIGKILL", "os._exit", "segmentation fault"])
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


def test_a_ray_worker_group_with_a_wrong_mesh_starts_no_worker(ray_backend):
    from hybridflow.controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    before, pool = list(ray_backend._processes), RayResourcePool([1])
    cls = RayClassWithInitArgs(Unlucky)
    try:
        with pytest.raises(DispatchError, match="has 3 ranks"):
            RayWorkerGroup(pool, cls, "actor", backend=ray_backend, meshes={"train": {"data": 3}})
        assert ray_backend._processes == before
    finally:
        ray_backend._stop([process for process in ray_backend._processes if process not in before])
        pool.release()


# ------------------------------------------------------------------------------------------ results


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("returns a number", DispatchError, r"returned int, but declares writes=\('y',\); return a DataProto"),
        ("returns nothing", DispatchError, r"returned NoneType, but declares writes=\('y',\); return a DataProto"),
        ("drops a row", DispatchError, "returned 1 rows for 2, but declares 1 for each; correct rows=.* return 2 rows"),
        ("returns z", FieldError, r"returned z, but declares writes=\('y',\): missing y; not declared z"),
        ("returns z on rank 1", FieldError, r"returned z, but declares writes=\('y',\): missing y"),
    ],
)
@pytest.mark.parametrize("is_remote", [False, True])
def test_error_for_an_undeclared_result_names_method_and_rank(group, how, kind, says, is_remote):
    with pytest.raises(kind, match=rf"^Unlucky\.compute on rank \d {says}") as caught:
        group.compute.remote(rows(), how).get() if is_remote else group.compute(rows(), how)
    assert "in Unlucky.compute, worker actor/" in caught.value.__notes__[0]
    assert len(group.compute(rows())) == 4


def test_error_for_different_undeclared_columns_names_the_method(group):
    for call in (group.compute_undeclared, lambda batch: group.compute_undeclared.remote(batch).get()):
        with pytest.raises(HybridFlowError, match=r"part 0 has \['y'\].* part 1 has \['z'\]") as caught:
            call(rows())
        assert caught.value.__notes__ == ["while collecting the results of Unlucky.compute_undeclared"]


def test_error_for_an_unpicklable_result_names_method_and_type(group):
    with pytest.raises(DispatchError, match=r"the result of Unlucky\.fail is a lock, which cannot be sent"):
        group.fail("a lock is returned")


# ------------------------------------------------------------------------------------------ arguments


def a_generator():
    return (number for number in range(3))


@pytest.mark.parametrize("make", [threading.Lock, a_generator])
@pytest.mark.parametrize("nest", ["alone", "in a list", "in a dict", "in an object column"])
def test_error_for_an_unpicklable_argument_names_method_and_type(group, make, nest):
    kind = type(make()).__name__
    if nest == "in an object column":
        objects = np.empty(4, dtype=object)
        objects[:] = [make() for _ in range(4)]
        batch = DataProto.from_dict({"x": torch.arange(4.0)}, {"things": objects})
        says = "argument 0 of Unlucky.compute: 'things' cannot be sent to another process, TypeError: cannot pickle "
        with pytest.raises(BatchError, match=says) as caught:
            group.compute(batch)
        assert kind in str(caught.value)
        return
    value = {"alone": make, "in a list": lambda: [[make()], [1]], "in a dict": lambda: {"a": {"b": make()}}}[nest]()
    with pytest.raises(DispatchError) as caught:
        group.count_calls(value)
    assert f"argument 0 of Unlucky.count_calls is a {kind}, which cannot be sent to " in str(caught.value)


def test_a_file_open_for_writing_cannot_be_sent(group, tmp_path):
    with open(tmp_path / "file", "w") as file, pytest.raises(DispatchError, match=r"argument value of .*TextIOWrapper"):
        group.count_calls(value=file)


def test_a_file_open_for_reading_cannot_be_sent_either(group, tmp_path):
    path = tmp_path / "file"
    path.write_text("contents")
    with open(path) as file, pytest.raises(DispatchError, match=r"argument value of .*TextIOWrapper"):
        group.count_calls(value=file)


def test_no_rank_is_called_if_one_argument_cannot_be_sent(group):
    before = group.count_calls()
    with pytest.raises(DispatchError):
        group.count_calls([1, threading.Lock()])
    assert group.count_calls() == [count + 1 for count in before]


def test_error_for_an_unknown_method_lists_registered_methods(group):
    for call in (lambda: group.nothing(), lambda: group.execute_all_sync("nothing")):
        with pytest.raises(AttributeError, match=r"'actor'.* has no method 'nothing'; Unlucky registers .*pid"):
            call()


def test_error_for_a_released_handle_says_to_keep_the_future(group):
    handle = group.execute_rank_zero("pid")
    handle.get()
    group.backend.release([handle])
    with pytest.raises(WorkerError, match="this result was released; keep the future"):
        handle.get()
    with pytest.raises(WorkerError, match="this result was released; keep the future"):
        group.count_calls(handle)


# ------------------------------------------------------------------------------------------ errors of methods


@pytest.mark.parametrize(
    ("how", "text"),
    [("cannot be unpickled", "CannotBeUnpickled: 1 and 2"), ("has a lock", "HasALock: locked")],
)
def test_an_unpicklable_error_arrives_as_its_text(group, how, text):
    with pytest.raises(WorkerError) as caught:
        group.fail(how)
    error = caught.value
    assert str(error) == f"Unlucky.fail failed on worker actor/1: {text}"
    assert (error.role, error.rank, bool(error.node)) == ("actor", 1, True)
    assert "in fail" in str(error.__cause__)  # the traceback of the worker
    assert len(group.compute(rows())) == 4


def test_an_error_unpicklable_in_the_driver_arrives_as_its_text(group):
    with pytest.raises(WorkerError, match=r"Unlucky.fail failed on worker actor/1: UnpicklableOutside"):
        group.fail("can be read by workers only")


def test_an_error_without_text_is_named_by_its_type(group):
    with pytest.raises(WorkerError, match=r"Unlucky.fail failed on worker actor/1: HasNoText"):
        group.fail("has no text")


def test_an_error_of_five_megabytes_arrives(group):
    with pytest.raises(WorkerError, match=r"^Unlucky.fail failed on worker actor/1: ValueError: hhh"):
        group.fail("is huge")


def test_a_keyboard_interrupt_in_a_method_is_a_worker_error(group):
    with pytest.raises(WorkerError) as caught:
        group.fail("KeyboardInterrupt")
    assert str(caught.value).startswith("Unlucky.fail failed on worker actor/1: ")
    assert group.is_alive()


def test_worker_error_names_a_keyboard_interrupt(group):
    with pytest.raises(WorkerError, match=r"worker actor/1: KeyboardInterrupt: by the test$"):
        group.fail("KeyboardInterrupt")


def test_system_exit_in_a_method_is_a_death_with_exit_code(start):
    doomed = start("actor")
    pids = doomed.pid()
    with pytest.raises(WorkerDiedError) as caught:
        doomed.fail("SystemExit")
    assert caught.value.rank == 1
    assert "died before Unlucky.fail finished" in str(caught.value)
    assert "exit code 3" in str(caught.value)
    wait_until_gone(pids)


def test_an_unread_error_does_not_affect_the_next_call(group):
    future = group.compute.remote(rows(), "raises")
    assert len(group.compute(rows())) == 4
    with pytest.raises(WorkerError, match="worker actor/1: ValueError: no luck"):
        future.get()
    with pytest.raises(WorkerError, match="worker actor/1: ValueError: no luck"):
        future.get("y")
    group.compute.remote(rows(), "raises")  # the call is released with its future
    gc.collect()
    assert len(group.compute(rows())) == 4


def test_an_error_reaches_the_reader_of_a_derived_future(group, other):
    future = other.pass_on.remote(group.compute.remote(rows(), "raises", seconds=0.3))
    with pytest.raises(WorkerError, match=r"^Unlucky.compute failed on worker actor/1: ValueError") as caught:
        future.get()
    assert (caught.value.role, caught.value.rank) == ("actor", 1)
    assert len(other.compute(rows())) == 4


# ------------------------------------------------------------------------------------------ deaths


@pytest.mark.parametrize("how", ["SIGKILL", "os._exit", "segmentation fault"])
def test_a_death_in_a_call_raises_at_once_and_stops_the_group(start, how):
    doomed = start("actor")
    pids = doomed.pid()
    with pytest.raises(WorkerDiedError) as caught:
        doomed.compute(rows(), how, seconds=0.3)
    error = caught.value
    assert str(error).startswith(f"worker actor/1 on node 127.0.0.1, pid {pids[1]} died before Unlucky.compute ")
    assert (error.role, error.rank, error.node) == ("actor", 1, "127.0.0.1")
    assert f"-{pids[1]}.err" in str(error)
    if how == "segmentation fault":
        assert "Fatal Python error: Segmentation fault" in str(error)
        assert "in die" in str(error)
    if how == "SIGKILL":
        assert "It exited without an error message; likely a signal" in str(error)
    wait_until_gone(pids)
    assert not doomed.is_alive()
    with pytest.raises(WorkerError, match=r"worker actor/0 has exited \(worker actor/1 .* died before .*"):
        doomed.pid()
    doomed.shutdown()
    with pytest.raises(DispatchError, match=r"Unlucky.pid was called on .* shut down; create a new group"):
        doomed.pid()


def test_a_death_between_calls_is_raised_by_the_next_call(start):
    doomed = start("actor")
    pids = doomed.pid()
    os.kill(pids[0], signal.SIGKILL)
    wait_until_gone(pids[:1])
    with pytest.raises(WorkerDiedError) as caught:
        doomed.compute(rows())
    assert caught.value.rank == 0
    assert "died before Unlucky.compute finished" in str(caught.value)
    wait_until_gone(pids)


def test_a_death_in_a_collective_is_raised_instead_of_its_consequences(start):
    doomed = start("actor")
    doomed.meet()
    with pytest.raises(WorkerDiedError) as caught:
        doomed.meet("SIGKILL")
    assert caught.value.rank == 1


def test_a_death_in_an_upstream_group_names_the_dead_worker(start, other):
    doomed = start("actor")
    pids = doomed.pid()
    future = doomed.compute.remote(rows(), "SIGKILL", seconds=0.5)
    try:
        with pytest.raises(WorkerError) as caught:
            other.pass_on(future)
        error = caught.value
        assert isinstance(error, WorkerDiedError)
        assert (error.role, error.rank) == ("actor", 1)
        assert "worker actor/1" in str(error)
        assert f"pid {pids[1]}" in str(error)
        wait_until_gone(pids)  # rank 0 of the group may wait for it in a collective
    finally:
        assert len(other.compute(rows())) == 4


def test_a_downstream_group_survives_a_death_upstream(start, other):
    doomed = start("actor")
    with pytest.raises(WorkerError):
        other.pass_on(doomed.compute.remote(rows(), "SIGKILL", seconds=0.3))
    assert len(other.compute(rows())) == 4
    with pytest.raises(WorkerError, match=r"has exited \(worker actor/1 on node"):
        doomed.pid()


def test_a_group_survives_an_unread_call_that_reads_from_a_dead_group(start, other):
    doomed = start("actor")
    lost = doomed.compute.remote(rows(), "SIGKILL", seconds=0.3)
    passed_on = other.pass_on.remote(lost)
    with pytest.raises(WorkerDiedError, match="worker actor/1"):
        lost.get()
    assert len(other.compute(rows(), seconds=1.0)) == 4  # a wait that is long enough to check other calls
    assert other.is_alive()
    with pytest.raises(WorkerDiedError, match="worker actor/1"):
        passed_on.get()
    assert len(other.compute(rows())) == 4


def test_error_for_a_future_of_a_closed_group_names_the_shutdown(start):
    closed = start("actor")
    finished, unfinished = closed.pid.remote(), closed.sleep.remote(600)
    assert len(finished.get()) == 2
    closed.shutdown()
    assert len(finished.get()) == 2
    with pytest.raises(WorkerError, match="shut down"):
        unfinished.get()


# ------------------------------------------------------------------------------------------ deadlines


def test_deadline_error_reports_the_call_and_stops_the_group(start, impatient):
    slow = start("actor", backend=impatient)
    pids = slow.pid()
    impatient.call_timeout_s = 2.0
    with pytest.raises(WorkerTimeoutError) as caught:
        slow.sleep(600)
    error, text = caught.value, str(caught.value)
    # the progress of a rank counts from when it is seen, so that one may be late before the other
    late = re.match(r"Unlucky\.sleep on actor, rank (0, 1|0|1), has been running for ", text)
    assert late, text
    assert "longer than its deadline of 2 s (controller.call_timeout_s)." in text
    ranks = [int(rank) for rank in late[1].split(", ")]
    for rank in ranks:
        assert f"actor/{rank}:\nProcess {pids[rank]} on " in text
    assert " in Unlucky.sleep\n" in text
    assert "The controller itself waits here:" in text
    assert "in test_deadline_error_reports_the_call_and_stops_the_group" in text
    assert (error.role, error.rank, error.node) == ("actor", ranks[0], "127.0.0.1")
    wait_until_gone(pids)
    with pytest.raises(WorkerError, match=r"worker actor/0 has exited .Unlucky.sleep on actor, rank [01]"):
        slow.pid()


def test_deadline_error_names_the_chain_and_stops_only_late_workers(start, other, impatient):
    slow, waits = start("actor", backend=impatient), start("reference", backend=impatient)
    slow_pids, pids = slow.pid(), waits.pid()
    impatient.call_timeout_s = 2.0
    future = waits.pass_on.remote(slow.compute.remote(rows(), seconds=600.0))
    with pytest.raises(WorkerTimeoutError) as caught:
        future.get()
    assert str(caught.value).startswith("Unlucky.compute on actor, rank 0,")
    assert "The controller waits for Unlucky.pass_on on reference/0, which waits for this call." in str(caught.value)
    wait_until_gone(slow_pids)
    impatient.call_timeout_s = 120
    assert waits.pid() == pids


def test_deadline_error_names_an_earlier_unread_call(start, impatient):
    slow = start("actor", backend=impatient)
    pids = slow.pid()
    impatient.call_timeout_s = 2.0
    future = slow.sleep.remote(600)
    with pytest.raises(WorkerTimeoutError, match=r"^Unlucky.sleep on actor, rank (0, 1|0|1),") as caught:
        slow.pid()
    assert "The controller waits for Unlucky.pid on actor/0, which waits for this call." in str(caught.value)
    wait_until_gone(pids)
    del future


def test_deadline_error_names_a_rank_left_in_a_collective(start, impatient):
    group = start("actor", backend=impatient)
    group.meet()
    with pytest.raises(WorkerError, match="rank 1 does not come"):
        group.meet("raises")
    (left,) = (call for worker in group.workers for call in worker.process.unfinished)
    left.timeout_s = 2.0
    with pytest.raises(WorkerTimeoutError, match=r"^Unlucky\.meet on actor, rank 0,"):
        group.pid()


# ------------------------------------------------------------------------------------------ released resources


def test_unread_results_that_were_passed_on_are_released(group, other):
    import ray
    from ray._private.internal_api import memory_summary

    def stored_mib():
        text = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
        line = next(x for x in text.splitlines() if x.startswith("Plasma memory usage"))
        return int(line.split()[3])

    before = stored_mib()
    for _ in range(4):
        assert other.sum_big(group.make_big.remote(rows(), 4)).batch["sums"].tolist() == [2.0**20] * 4
    gc.collect()
    end = time.monotonic() + 100
    while stored_mib() - before >= 16 and time.monotonic() < end:
        time.sleep(0.1)
    assert stored_mib() - before < 16  # one result has 16 MiB


@pytest.mark.parametrize("is_plain", [False, True])
def test_an_unreferenced_pool_without_groups_is_released(ray_backend, is_plain):
    import ray

    from hybridflow.controller.ray import RayResourcePool

    pool = ResourcePool([1]) if is_plain else RayResourcePool([1])
    group = WorkerGroup(pool, ClassWithInitArgs(Unlucky), ray_backend, "actor")
    reserved = list((ray_backend._own_pools[id(pool)] if is_plain else pool)._groups)
    group.shutdown()
    del pool, group
    gc.collect()

    def states():
        return [ray.util.placement_group_table(placement_group)["state"] for placement_group in reserved]

    try:
        end = time.monotonic() + 100
        while states() != ["REMOVED"] and time.monotonic() < end:
            time.sleep(0.1)
        assert states() == ["REMOVED"]
    finally:
        for placement_group in reserved:
            ray.util.remove_placement_group(placement_group)


# ------------------------------------------------------------------------------------------ the driver


def test_two_threads_call_two_groups_at_the_same_time(group, other):
    results, errors = {}, []

    def work(name, called):
        try:
            results[name] = [called.compute(rows(6)).batch["y"].tolist() for _ in range(20)]
            called.sleep(0.5)
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


def test_error_for_a_ray_client_address_names_the_address_to_use():
    from hybridflow.controller.ray import RayBackend

    with pytest.raises(ConfigError, match=r"'ray://head:10001' .*address='auto' .* 'head:6379'"):
        RayBackend("ray://head:10001")


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_call_timeout_must_be_positive_seconds(timeout_s):
    from hybridflow.controller.ray import RayBackend

    with pytest.raises(ConfigError, match="is invalid: expected seconds above 0, or None"):
        RayBackend(call_timeout_s=timeout_s)


@pytest.fixture(scope="module")
def run_script(fork_server):
    """Run a script in a separate process; return what it and Ray print."""

    def run(script, timeout_s, **environment):
        process = fork_server.start(["-c", script], environment={**os.environ, **environment}, merge_streams=True)
        try:
            return process.communicate(timeout=timeout_s)[0]
        finally:
            process.discard()

    return run


NO_CLUSTER = """
import ray
from hybridflow.controller import ResourcePool
from hybridflow.controller.ray import RayBackend
from hybridflow.errors import ConfigError

def init(*_, **__):
    raise RuntimeError("ray.init was called, which retries for minutes")

ray.init = init
try:
    RayBackend("127.0.0.1:9").check_fit([ResourcePool([1])])
except ConfigError as error:
    print("refused:", error)
"""


def test_an_unreachable_address_is_an_error_before_ray_is_initialized(run_script):
    output = run_script(NO_CLUSTER, 120)
    assert "refused: no Ray cluster answers at address='127.0.0.1:9'" in output


CLOSED = """
import ray
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend
from hybridflow.controller.ray.reaper import cluster_processes
from hybridflow.errors import WorkerError

class Echo(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

backend = RayBackend(num_cpus=2)
backend.close()
pool = ResourcePool([1])
group = WorkerGroup(pool, ClassWithInitArgs(Echo), backend)
future = group.echo.remote(1)
print(group.echo(2))
session = backend._connection._local.session
backend.close()
backend.close()
print("left", cluster_processes(session), group.is_alive())

def attempt(call):
    try:
        print(call())
    except WorkerError as error:
        print("WorkerError:", error)
    except BaseException as error:
        print("raised:", type(error).__name__, error)

attempt(lambda: group.echo(3))
with WorkerGroup(pool, ClassWithInitArgs(Echo), backend) as again:
    print(again.echo(4))
backend.close()

def init(*_, **__):
    raise RuntimeError("ray.init was called")

ray.init = init
attempt(future.get)
"""


@pytest.fixture(scope="module")
def closed(run_script):
    return run_script(CLOSED, 120).splitlines()


def test_closing_a_backend_twice_is_allowed_and_leaves_no_process(closed):
    assert closed[0] == "[2]"
    assert closed[1] == "left [] False"


def test_calls_on_a_group_of_a_closed_backend_raise(closed):
    assert closed[2] == "WorkerError: worker Echo/0 was shut down; echo cannot be called on it."


def test_a_closed_backend_can_be_used_again(closed):
    assert closed[3] == "[4]"


def test_reading_a_future_of_a_closed_backend_is_a_worker_error(closed):
    assert closed[4].startswith("WorkerError: ")


# ------------------------------------------------------------------------------------------ GPUs


GPUS = """
import ray
from hybridflow.controller import ClassWithInitArgs, Worker, WorkerGroup
from hybridflow.controller.ray import RayBackend, RayResourcePool
from hybridflow.errors import HybridFlowError

def attempt(name, backend):
    try:
        WorkerGroup(RayResourcePool([1], use_gpu=True), ClassWithInitArgs(Worker), backend)
    except HybridFlowError as error:
        print(name, type(error).__name__, str(error).replace(chr(10), " "))

with RayBackend() as backend:
    print("has", backend.has_gpus())
    attempt("none", backend)
    backend.close()
ray.init(num_cpus=1, num_gpus=1, include_dashboard=False, _temp_dir=DIRECTORY)  # as a cluster of other nodes
with RayBackend() as backend:
    print("has", backend.has_gpus())
    attempt("no driver", backend)
ray.shutdown()
"""


@pytest.mark.slow
def test_gpus_are_those_of_the_cluster_and_a_rank_without_its_gpu_is_an_error(run_script):
    if torch.cuda.is_available():
        pytest.skip("for a machine without a GPU")
    with tempfile.TemporaryDirectory(prefix="hf") as directory:  # pytest's is too long for Ray's sockets
        output = run_script(GPUS.replace("DIRECTORY", repr(directory)), 300)
    lines = [line for line in output.splitlines() if line.startswith(("has", "none", "no driver"))]
    assert [line for line in lines if line.startswith("has")] == ["has False", "has True"], output
    assert re.match(r"none ConfigError RayResourcePool.* does not fit the cluster: .*each with 1 CPU, 1 GPU", lines[1])
    assert re.search(r"^no driver .*Ray assigned GPU 0 .* finds no CUDA device there .*install a CUDA build", lines[3])


ALL_GPUS_VISIBLE = """
import os, torch
from hybridflow.controller import ClassWithInitArgs, Worker, WorkerGroup
from hybridflow.controller.ray import RayBackend, RayResourcePool
from hybridflow.errors import ConfigError

os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
torch.cuda.device_count = lambda: 2
with RayBackend(num_cpus=2, num_gpus=2) as backend:
    WorkerGroup(RayResourcePool([1]), ClassWithInitArgs(Worker), backend)
    print("without a GPU: started")
    try:
        WorkerGroup(RayResourcePool([1], use_gpu=True), ClassWithInitArgs(Worker), backend)
    except ConfigError as error:
        print("with a GPU:", str(error).replace(chr(10), " "))
"""


@pytest.mark.slow
def test_a_rank_that_sees_the_gpus_of_other_ranks_is_an_error(run_script):
    output = run_script(ALL_GPUS_VISIBLE, 300)
    assert "without a GPU: started" in output
    message = (
        r"with a GPU: .*RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES='1' is not supported: this rank sees all GPUs of "
        r"node \S+ instead of GPU \d, which Ray assigned to it.*; unset the variable"
    )
    assert re.search(message, output), output


SHARED_GPU = """
import ray, torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from hybridflow.controller.ray import RayBackend, RayResourcePool

torch.cuda.device_count = lambda: 8
with RayBackend(num_gpus=NUM_GPUS) as backend:
    pools = [RayResourcePool([1], use_gpu=True, gpus_per_process=0.5) for _ in range(2)]
    backend.check_fit(pools)
    gpus = ray.remote(num_cpus=1, num_gpus=0.5)(ray.get_gpu_ids)
    strategies = [PlacementGroupSchedulingStrategy(p.group, p.bundle) for pool in pools for p in pool.places()]
    found = ray.get([gpus.options(scheduling_strategy=strategy).remote() for strategy in strategies])
    print("cluster", ray.cluster_resources()["GPU"], "ids", found)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("num_gpus", "of_cluster"), [(0, 1), (4, 4)])
def test_pools_of_half_a_gpu_share_one(run_script, num_gpus, of_cluster):
    output = run_script(SHARED_GPU.replace("NUM_GPUS", str(num_gpus)), 300)
    (line,) = [line for line in output.splitlines() if line.startswith("cluster")]
    number = re.fullmatch(rf"cluster {of_cluster}\.0 ids \[\[(\d)\], \[(\d)\]\]", line)
    assert number is not None, line
    assert number[1] == number[2]


@pytest.mark.parametrize("share", [0, 1.5, float("nan")])
def test_a_share_of_a_gpu_must_be_above_0_and_at_most_1(share):
    from hybridflow.controller.ray import RayResourcePool

    with pytest.raises(ConfigError, match="expected a share of a GPU, above 0 and at most 1"):
        RayResourcePool([1], use_gpu=True, gpus_per_process=share)


# ------------------------------------------------------------------------------------------ deaths of Ray's services


SERVICE_DIES = """
import os, signal, sys, time
import ray
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend, cluster_watch
from hybridflow.errors import LostWorkerError

cluster_watch.LAST_RESORT_S = 8.0

class Echo(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, seconds):
        time.sleep(seconds)

backend = RayBackend(num_cpus=1)
group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), backend)
(service,) = ray._private.worker._global_node.all_processes[SERVICE]
os.kill(service.process.pid, signal.SIGKILL)
if STUCK:
    ray.util.remove_placement_group(ray.util.placement_group([{"CPU": 1}]))
    print("not stuck")
try:
    group.echo(600)
except LostWorkerError as error:
    print("lost:", error)
backend.close()
print("closed")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("service", "name"), [("gcs_server", "control service"), ("raylet", "raylet of this node")])
def test_the_death_of_a_service_of_ray_is_an_error_that_can_be_handled(run_script, service, name):
    output = run_script(SERVICE_DIES.replace("SERVICE", repr(service)).replace("STUCK", "False"), 300)
    assert re.search(rf"^lost: the {name}.* has died: it has not accepted a connection for ", output, re.MULTILINE)
    assert output.splitlines()[-1] == "closed"


SERVICE_STOPS = SERVICE_DIES.replace(
    "cluster_watch.LAST_RESORT_S = 8.0", "cluster_watch.STOPPED_PATIENCE_S = 6.0"
).replace("signal.SIGKILL", "signal.SIGSTOP")


@pytest.mark.slow
@pytest.mark.parametrize(("service", "name"), [("gcs_server", "control service"), ("raylet", "raylet of this node")])
def test_a_service_of_ray_that_is_stopped_for_long_is_an_error_too(run_script, service, name):
    output = run_script(SERVICE_STOPS.replace("SERVICE", repr(service)).replace("STUCK", "False"), 300)
    assert re.search(rf"^lost: the {name}.* is stopped: it has not run for [6-9] s", output, re.MULTILINE)
    assert output.splitlines()[-1] == "closed"


SERVICE_CONTINUES = (
    SERVICE_DIES.partition("if STUCK:")[0].replace("SIGKILL", "SIGSTOP")
    + """
import threading
import psutil
while psutil.Process(service.process.pid).status() != psutil.STATUS_STOPPED:  # a busy machine delivers a signal late
    time.sleep(0.01)
start = time.monotonic()
threading.Timer(4, os.kill, (service.process.pid, signal.SIGCONT)).start()
backend.settle(group.workers, 30)
assert time.monotonic() - start > 3
group.echo(0)
backend.close()
print("closed")
"""
)


@pytest.mark.slow
def test_a_recovery_waits_for_a_service_that_is_stopped(run_script):
    output = run_script(SERVICE_CONTINUES.replace("SERVICE", repr("raylet")), 300)
    assert output.splitlines()[-1] == "closed"


DISCONNECTED = """
import time
import ray
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend, cluster_watch

cluster_watch.PATIENCE_S = cluster_watch.PATIENCE_LOCAL_S = 5.0
cluster_watch.LAST_RESORT_S = 10.0  # longer than a shutdown takes on a busy machine

class Echo(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

def init():
    ray.init(num_cpus=1, include_dashboard=False, _temp_dir=DIRECTORY)

init()
backend = RayBackend()
WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), backend)
ray.shutdown()
time.sleep(15)
init()
print(WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), backend).echo("again"))
print(backend._connection._watch.is_current)
backend.close()
ray.shutdown()
"""


@pytest.mark.slow
def test_a_process_that_has_left_its_cluster_is_not_ended(run_script):
    with tempfile.TemporaryDirectory(prefix="hf") as directory:  # pytest's is too long for Ray's sockets
        output = run_script(DISCONNECTED.replace("DIRECTORY", repr(directory)), 300)
    assert "has died" not in output
    assert output.splitlines()[-2:] == ["['again']", "True"], output


@pytest.mark.slow
def test_a_process_that_waits_for_a_dead_service_ends_with_a_message(run_script):
    output = run_script(SERVICE_DIES.replace("SERVICE", "'gcs_server'").replace("STUCK", "True"), 300)
    assert re.search(r"^error: the control service .* the same command continues from the last", output, re.MULTILINE)
    assert "not stuck" not in output


# ------------------------------------------------------------------------------------------ the store


STORE = """
import os, torch
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend
from hybridflow.errors import HybridFlowError
from hybridflow.protocol import DataProto

class Big(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, writes=("big",))
    def make(self, batch):
        return DataProto.from_dict({"big": torch.ones(len(batch), 50 * 2**18)})

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("sums",))
    def sum(self, batch):
        return DataProto.from_dict({"sums": batch.batch["big"].sum(1)})

def attempt(name, call):
    try:
        print(name, call(), flush=True)
    except HybridFlowError as error:
        print(name, "error:", type(error).__name__, str(error)[:2000].replace(chr(10), " "), flush=True)
    except BaseException as error:
        print(name, "raised:", repr(error)[:300].replace(chr(10), " "), flush=True)

backend = RayBackend(num_cpus=1, object_store_bytes=80 * 2**20, call_timeout_s=120)
group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Big), backend)
rows = DataProto.from_dict({"x": torch.arange(NUM_ROWS)})
attempt("result", lambda: group.make(rows).batch["big"].sum().item() / 2**18)
attempt("passed on", lambda: group.sum(group.make.remote(rows)).batch["sums"].sum().item() / 2**18)
big = DataProto.from_dict({"big": torch.ones(NUM_ROWS, 50 * 2**18)})
attempt("argument", lambda: group.sum(big).batch["sums"].sum().item() / 2**18)
def keep():
    kept = [group.make.remote(rows) for _ in range(2)]
    return sum(future.get().batch["big"].sum().item() for future in kept) / 2**18
attempt("kept", keep)
attempt("small", lambda: group.sum(DataProto.from_dict({"big": torch.ones(2, 3)})).batch["sums"].tolist())
backend.close()
"""


def test_results_and_arguments_larger_than_the_object_store_arrive(run_script):
    output = run_script(STORE.replace("NUM_ROWS", "2"), 280)
    lines = [
        line for line in output.splitlines() if line.startswith(("result", "passed on", "argument", "kept", "small"))
    ]
    assert lines == ["result 100.0", "passed on 100.0", "argument 100.0", "kept 200.0", "small [3.0, 3.0]"], output


@pytest.fixture(scope="module")
def store_on_a_small_disk(run_script):
    """Yield the output of the script with a 64 MiB disk for spilled objects."""
    directory = Path(f"/tmp/hf{os.getpid() % 10**6}")
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", directory], capture_output=True)
    if mounted.returncode != 0:
        directory.rmdir()
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield run_script(STORE.replace("NUM_ROWS", "4"), 280, TMPDIR=str(directory))
    finally:
        subprocess.run(["umount", "-l", directory], check=True)
        directory.rmdir()


@pytest.mark.parametrize("what", ["result", "passed on", "argument", "kept"])
def test_a_full_store_and_disk_raise_an_error_before_the_deadline(store_on_a_small_disk, what):
    lines = [line for line in store_on_a_small_disk.splitlines() if line.startswith(what)]
    assert len(lines) == 1, store_on_a_small_disk
    assert lines[0].startswith(f"{what} error: "), store_on_a_small_disk
    assert "WorkerTimeoutError" not in lines[0]


def test_error_for_a_full_store_names_the_call_that_made_the_result(store_on_a_small_disk):
    (line,) = (line for line in store_on_a_small_disk.splitlines() if line.startswith("passed on"))
    assert "a result of Big.make fits neither into the shared memory of its node nor on its disk" in line


def test_a_group_survives_a_full_store(store_on_a_small_disk):
    assert "small [3.0, 3.0]" in store_on_a_small_disk.splitlines(), store_on_a_small_disk
