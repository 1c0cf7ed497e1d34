"""A call over its deadline: its error reports the worker, names what is unknown, and leaves no process."""

import ctypes
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, Dispatch, Worker, WorkerGroup, register
from hybridflow.controller.backend import NO_TERMS
from hybridflow.errors import WorkerError, WorkerTimeoutError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")]


class Stuck(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def join(self):
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def reduce_without_rank_1(self):
        if self.rank == 0:
            self.wait_for_rank_1()

    def wait_for_rank_1(self):
        torch.distributed.all_reduce(torch.ones(3))

    @register(Dispatch.ONE_TO_ALL)
    def hold_the_lock(self, how):
        if self.rank == 1 and how == "computes":
            re.match(r"(a+)+$", "a" * 60 + "b")
        if self.rank == 1 and how == "waits":
            ctypes.PyDLL(None).sleep(600)

    @register(Dispatch.ONE_TO_ALL)
    def stop_rank_1(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


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


@pytest.fixture
def overdue(ray_backend):
    """Yield `overdue("method", ...)`, which returns a 3 s deadline's error, the process ids, and the group."""
    from hybridflow.controller.ray import RayBackend, RayResourcePool

    ray_backend.check_fit([RayResourcePool([1])])  # starts the cluster, before another backend does
    pool, pids = RayResourcePool([2]), []
    with RayBackend(call_timeout_s=120) as backend:
        group = WorkerGroup(pool, ClassWithInitArgs(Stuck), backend, "actor")
        pids += group.join()

        def call(method, *arguments):
            backend.call_timeout_s = 3.0
            with pytest.raises(WorkerTimeoutError) as caught:
                getattr(group, method)(*arguments)
            return caught.value, pids, group

        yield call
        group.shutdown()
        pool.release()
    for pid in pids:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


def paragraphs(error):
    """Return the text of the error for each worker, by name, and for the controller as "controller"."""
    found = {"": ""}
    name = ""
    for line in str(error).splitlines():
        if re.fullmatch(r"actor/\d:", line):
            name = line[:-1]
        if line == "The controller itself waits here:":
            name = "controller"
        found[name] = found.get(name, "") + line + "\n"
    return found


def test_report_shows_the_line_of_a_worker_blocked_in_all_reduce(overdue):
    error, pids, group = overdue("reduce_without_rank_1")
    said = paragraphs(error)
    assert said[""].startswith("Stuck.reduce_without_rank_1 on actor, rank 0, has been running for ")
    assert "longer than its deadline of 3 s (controller.call_timeout_s)." in said[""]
    assert f"Process {pids[0]} on " in said["actor/0"]
    assert re.search(r" is blocked; it uses \d+% of a core, it has \d+ MiB in memory", said["actor/0"])
    assert " in Stuck.wait_for_rank_1\n" in said["actor/0"]
    assert " in Stuck.reduce_without_rank_1\n" in said["actor/0"]
    assert f"{Path(__file__).name}" in said["actor/0"]
    assert "in all_reduce\n" in said["actor/0"]
    assert "Not seen:\n  - Frames below Python (C, C++, CUDA)" in said["actor/0"]
    assert "actor/1" not in said  # it has answered
    assert "test_report_shows_the_line_of_a_worker_blocked_in_all_reduce" in said["controller"]
    assert (error.role, error.rank, error.node) == ("actor", 0, "127.0.0.1")
    wait_until_gone(pids)
    assert not group.is_alive()
    with pytest.raises(WorkerError, match="worker actor/1 has exited"):
        group.backend.call_all(group.workers[1:2], "pid", [((), {})], [NO_TERMS])


@pytest.mark.parametrize(("how", "says"), [("computes", "while the process runs"), ("waits", "and waits with it")])
def test_report_shows_a_worker_that_holds_the_interpreter_lock(overdue, how, says):
    error, pids, group = overdue("hold_the_lock", how)
    said = paragraphs(error)
    assert said[""].startswith("Stuck.hold_the_lock on actor, rank 1, has been running for ")
    assert f"Process {pids[1]} on " in said["actor/1"]
    (finding,) = [line for line in said["actor/1"].splitlines() if line.startswith("Thread MainThread held ")]
    assert says in finding
    assert "C code holds the interpreter lock" in finding
    assert " in Stuck.hold_the_lock\n" in said["actor/1"]
    assert "  - Frames below Python (C, C++, CUDA)" in said["actor/1"]
    assert (error.role, error.rank) == ("actor", 1)
    wait_until_gone(pids)
    assert not group.is_alive()


def test_report_shows_the_line_of_a_stopped_worker(overdue):
    error, pids, group = overdue("stop_rank_1")
    said = paragraphs(error)
    assert said[""].startswith("Stuck.stop_rank_1 on actor, rank 1, has been running for ")
    assert f"Process {pids[1]} on " in said["actor/1"]
    assert " is stopped; it uses 0% of a core" in said["actor/1"]
    assert "It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on." in said["actor/1"]
    assert " in Stuck.stop_rank_1\n" in said["actor/1"]
    wait_until_gone(pids)  # after some seconds, Ray kills processes that do not exit
    assert not group.is_alive()
