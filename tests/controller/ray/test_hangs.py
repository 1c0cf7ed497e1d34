"""Hangs on a cluster: a missing heartbeat, a call without progress, and reports of what each process does."""

import ctypes
import itertools
import os
import signal
import sys
import time
from contextlib import contextmanager

import pytest

from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend
from hybridflow.errors import WorkerTimeoutError
from hybridflow.runtime import note_progress

pytestmark = [
    pytest.mark.ray,
    pytest.mark.own_run("ray_two: its workers hang, and py-spy looks at them"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc"),
]


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


@contextmanager
def jumping_clock():
    """Let `time.time` of this process jump by a year, back and forth."""
    original, jumps = time.time, itertools.cycle([0, 1, -1])
    time.time = lambda: original() + next(jumps) * 365 * 86400.0
    try:
        yield
    finally:
        time.time = original


def stored_keys():
    from ray.experimental import internal_kv

    return set(internal_kv._internal_kv_list("heartbeats/", namespace="hybridflow"))


@pytest.fixture
def start(ray_backend, wait_until_gone):
    """Yield `start(name="actor", backend=None, **options)`: a group of two, on a backend with these options.

    At the end, no process is left.
    """
    groups, backends, pids = [], [], []

    def start(name="actor", backend=None, **options):
        if backend is None:
            backends.append(backend := RayBackend(**{"call_timeout_s": 120, **options}))
        groups.append(WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Slow), backend, name))
        pids.extend(groups[-1].pid())
        return groups[-1]

    yield start
    for group in groups:
        group.shutdown()
    for backend in backends:
        backend.close()
    wait_until_gone(pids)


def test_a_stopped_worker_is_noticed_by_its_missing_heartbeat(start, wait_until, wait_until_gone):
    before = stored_keys()
    group = start(heartbeat_timeout_s=3.0)
    pids = group.pid()
    wait_until(lambda: len(stored_keys() - before) == 2)
    with pytest.raises(WorkerTimeoutError) as caught:
        group.stop_rank_1()
    error, text = caught.value, str(caught.value)
    assert text.startswith(f"worker actor/1 on node 127.0.0.1, pid {pids[1]} is stopped by a signal (T): it has not ")
    assert "while Slow.stop_rank_1 runs on it (limit: 3 s, controller.heartbeat_timeout_s=3)." in text
    assert "It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on." in text
    assert " in Slow.stop_rank_1\n" in text
    assert (error.role, error.rank, error.node) == ("actor", 1, "127.0.0.1")
    wait_until_gone(pids)
    wait_until(lambda: not stored_keys() - before)  # the keys are deleted with their group


@pytest.mark.exhaustive
def test_a_worker_that_holds_the_interpreter_lock_is_not_lost(start, caplog):
    group = start(heartbeat_timeout_s=3.0)
    assert group.hold_the_lock(9) == ["done", "done"]  # three times the limit
    silent = [record.getMessage() for record in caplog.records if record.name.endswith("silence")]
    assert silent
    assert "it has not sent a heartbeat for" in silent[0]
    assert "it counts as lost after 30 s.\nProcess " in silent[0]
    assert start("critic").hold_the_lock(5) == ["done", "done"]


@pytest.mark.exhaustive
def test_a_clock_that_jumps_changes_no_decision(start):
    group = start(call_timeout_s=20.0, heartbeat_timeout_s=10.0, report_after_s=20.0)
    with jumping_clock():
        assert group.work_while_the_clock_jumps(8) == ["done", "done"]


@pytest.mark.exhaustive
def test_a_call_outlives_its_deadline_while_it_makes_progress(start):
    group = start()
    group.backend.call_timeout_s = 8.0
    assert group.work(20) == ["done", "done"]
    with pytest.raises(WorkerTimeoutError) as caught:
        group.work(5, then_sleep_s=600)
    assert " s of them without progress, longer than its deadline of 8 s (controller.c" in str(caught.value)


# What a process does that is over its deadline
