"""Hangs on a cluster: a missing heartbeat, a call without progress, and the report of who waits for whom."""

import ctypes
import itertools
import logging
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray.hang_report import HangReports
from hybridflow.controller.ray.heartbeat import LONGEST_GAP_S, Heartbeats, delete_heartbeat
from hybridflow.controller.ray.processes import RayCall, RayProcess, RayWorker
from hybridflow.errors import WorkerTimeoutError
from hybridflow.protocol import DataProto
from hybridflow.runtime import note_progress

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")]

REPORTS = "hybridflow.controller.ray.hang_report"


class Slow(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

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
    def stop_rank_1(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    @register(Dispatch.ONE_TO_ALL)
    def hold_the_lock(self, seconds):
        ctypes.PyDLL(None).sleep(seconds)
        return "done"

    @register(Dispatch.ONE_TO_ALL)
    def work_while_the_clock_jumps(self, seconds):
        with jumping_clock():
            return self.work(seconds)

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("y",))
    def compute(self, batch, seconds):
        time.sleep(seconds)
        return DataProto.from_dict({"y": batch.batch["x"]})

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("z",))
    def pass_on(self, batch):
        return DataProto.from_dict({"z": batch.batch["y"]})


@contextmanager
def jumping_clock():
    """Let `time.time` of this process jump by a year, back and forth."""
    original, jumps = time.time, itertools.cycle([0, 1, -1])
    time.time = lambda: original() + next(jumps) * 365 * 86400.0
    try:
        yield
    finally:
        time.time = original


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until(is_true, timeout_s=100.0):
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def stored_keys():
    from ray.experimental import internal_kv

    return internal_kv._internal_kv_list("heartbeats/", namespace="hybridflow")


@pytest.fixture
def start(ray_backend):
    """Yield `start(name="actor", backend=None, **options)`: a group of two, on a backend with these options."""
    from hybridflow.controller.ray import RayBackend, RayResourcePool

    ray_backend.check_fit([RayResourcePool([1])])  # starts the cluster, before another backend does
    groups, backends, pids = [], [], []

    def start(name="actor", backend=None, **options):
        if backend is None:
            backends.append(backend := RayBackend(**{"call_timeout_s": 120, **options}))
        groups.append(WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Slow), backend, name))
        pids.extend(groups[-1].pid())
        return groups[-1]

    yield start
    for closed in [*groups, *backends]:
        closed.shutdown() if isinstance(closed, WorkerGroup) else closed.close()
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid))


# ------------------------------------------------------------------------------------------ heartbeats


def test_a_stopped_worker_is_noticed_by_its_missing_heartbeat(start):
    group = start(heartbeat_timeout_s=3.0)
    pids = group.pid()
    with pytest.raises(WorkerTimeoutError) as caught:
        group.stop_rank_1()
    error, text = caught.value, str(caught.value)
    assert text.startswith(f"worker actor/1 on node 127.0.0.1, pid {pids[1]} is stopped by a signal (T): it has not ")
    assert "while Slow.stop_rank_1 runs on it (limit: 3 s, controller.heartbeat_timeout_s=3)." in text
    assert "It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on." in text
    assert " in Slow.stop_rank_1\n" in text
    assert (error.role, error.rank, error.node) == ("actor", 1, "127.0.0.1")
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid))


def test_keys_of_heartbeats_are_deleted_with_their_group(start):
    before = set(stored_keys())
    group = start()
    wait_until(lambda: len(set(stored_keys()) - before) == 2)
    group.shutdown()
    wait_until(lambda: not set(stored_keys()) - before)


def test_a_worker_that_holds_the_interpreter_lock_is_not_lost(start, caplog):
    group = start(heartbeat_timeout_s=3.0)
    assert group.hold_the_lock(9) == ["done", "done"]  # three times the limit
    silent = [record.getMessage() for record in caplog.records if record.name.endswith("silence")]
    assert silent
    assert "it has not sent a heartbeat for" in silent[0]
    assert "it counts as lost after 30 s.\nProcess " in silent[0]
    assert start("critic").hold_the_lock(5) == ["done", "done"]


def test_a_clock_that_jumps_changes_no_decision(start):
    group = start(call_timeout_s=20.0, heartbeat_timeout_s=10.0, report_after_s=20.0)
    with jumping_clock():
        assert group.work_while_the_clock_jumps(8) == ["done", "done"]


def test_seconds_in_which_the_driver_did_not_look_do_not_count(start):
    start()
    from ray.experimental import internal_kv

    process = RayProcess(SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "test")), "actor/0", 0, {"actor"})
    heartbeats = Heartbeats()
    heartbeats.look([process])
    assert (heartbeats.silent_s(process), heartbeats.idle_s(process)) == (0.0, float("inf"))
    internal_kv._internal_kv_put("heartbeats/test", "7 3", namespace="hybridflow")
    heartbeats.look([process], again=True)
    assert (heartbeats.silent_s(process), heartbeats.idle_s(process)) == (0.0, 0.0)
    time.sleep(2 * LONGEST_GAP_S)
    heartbeats.look([process])
    assert (heartbeats.silent_s(process), heartbeats.idle_s(process)) == (LONGEST_GAP_S, LONGEST_GAP_S)
    internal_kv._internal_kv_put("heartbeats/test", "8 3", namespace="hybridflow")
    time.sleep(2 * LONGEST_GAP_S)
    heartbeats.look([process])
    assert (heartbeats.silent_s(process), heartbeats.idle_s(process)) == (0.0, 2 * LONGEST_GAP_S)
    delete_heartbeat(process)
    assert b"heartbeats/test" not in stored_keys()


# ------------------------------------------------------------------------------------------ progress


def test_a_call_that_makes_progress_outlives_its_deadline(start):
    group = start()
    group.backend.call_timeout_s = 8.0
    assert group.work(20) == ["done", "done"]


def test_a_call_whose_progress_ends_is_over_its_deadline(start):
    group = start()
    pids = group.pid()
    group.backend.call_timeout_s = 8.0
    with pytest.raises(WorkerTimeoutError) as caught:
        group.work(5, then_sleep_s=600)
    assert " s of them without progress, longer than its deadline of 8 s (controller.c" in str(caught.value)
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid))


# ------------------------------------------------------------------------------------------ reports


def test_report_names_the_chain_of_calls_with_stacks(start, caplog):
    producer = start(report_after_s=2.0)
    consumer = start("reference", producer.backend)
    caplog.clear()  # of the start of the processes
    batch = DataProto.from_dict({"x": torch.arange(2)})
    future = consumer.pass_on.remote(producer.compute.remote(batch, 10.0))
    assert future.get().batch["z"].tolist() == [0, 1]
    text = next(record.getMessage() for record in caplog.records if record.name == REPORTS)
    assert text.startswith("No progress for ")
    assert (
        "The controller waits for Slow.pass_on on reference/0, which reads the result of Slow.compute on actor/" in text
    )
    assert ", which runs.\n" in text
    assert " in Slow.compute\n" in text
    assert "The controller itself waits here:" in text
    assert "in test_report_names_the_chain_of_calls_with_stacks" in text


def pending_calls():
    process = RayProcess(None, "actor/0", 0, {"actor"})
    worker = RayWorker("actor/0", "actor", 0, "Actor", process)
    calls = [RayCall(None, worker, f"Actor.{name}", None) for name in ("update", "save")]
    process.unfinished = calls
    return calls


def test_report_is_repeated_after_progress_or_ten_times_as_long(caplog):
    reports, calls = HangReports(60.0), pending_calls()
    counts = []
    for quiet_s in (1.0, 59.0, 61.0, 62.0, 599.0, 601.0, 0.5, 61.0, 62.0):
        reports.check(calls[1:], lambda call, quiet_s=quiet_s: quiet_s)
        counts.append(len(caplog.records))
    assert counts == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    text = caplog.records[0].getMessage()
    assert text.startswith("No progress for 61 s in Actor.update on actor/0.\nThe controller waits for Actor.save on ")
    assert "on actor/0, which runs after Actor.update on actor/0, which runs.\nactor/0:\n" in text
    HangReports(None).check(calls, lambda call: 1e9)
    assert len(caplog.records) == 3


def test_a_report_that_cannot_be_made_does_not_fail_the_wait(caplog):
    calls = pending_calls()
    calls[0].worker.process.home = "not a home"
    HangReports(60.0).check(calls, lambda call: 61.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("no report of a wait without progress could be made: AttributeError")
