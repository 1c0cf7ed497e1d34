"""Processes that wait beside the ranks of a group, and replace them at a restart."""

import importlib
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import ray
import torch

from hybridflow.controller import (
    ClassWithInitArgs,
    Dispatch,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
    spawn_colocated,
)
from hybridflow.controller.ray import standbys as module
from hybridflow.errors import ConfigError, WorkerDiedError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")]


class Counter(Worker):
    """Counts its calls."""

    def __init__(self, start: int) -> None:
        self.count = start

    @register(Dispatch.ONE_TO_ALL)
    def add(self) -> int:
        self.count += 1
        return self.count

    @register(Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, str, str]:
        return os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"]


@pytest.fixture
def group(ray_backend):
    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Counter, 3), backend=ray_backend)
    yield group
    group.shutdown()


def standbys_of(backend, group):
    return backend._standbys._of.get(group.workers[0].process.launch, [])


def pids_of(standbys):
    return [home.address.pid for home in ray.get([standby.actor.home.remote() for standby in standbys])]


def lose_and_restart(backend, group):
    os.kill(group.workers[1].process.home.address.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        group.add()
    assert backend.settle(group.workers, 10) == group.workers
    backend.restart(group.workers)


def wait_until_ended(pids):
    deadline = time.monotonic() + 30
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def runs(pid):
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_standbys_take_the_places_of_the_ranks_and_are_replaced(ray_backend, group):
    for _ in range(2):
        ray_backend.keep_standbys(group.workers)
        waiting = pids_of(standbys_of(ray_backend, group))
        ray_backend.keep_standbys(group.workers)
        assert pids_of(standbys_of(ray_backend, group)) == waiting
        lose_and_restart(ray_backend, group)
        assert group.place() == [(waiting[0], "0", "2"), (waiting[1], "1", "2")]
        assert group.add() == [4, 4]
        assert standbys_of(ray_backend, group) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that the standby shall look for must not exist")
def test_standbys_take_over_the_gpus_of_the_lost_processes(ray_backend, group):
    ray_backend.keep_standbys(group.workers)
    for process, gpu in zip(group.workers[0].process.peers, "53", strict=True):
        process.home = replace(process.home, gpu_ids=(gpu,))
    missing = r"GPU (\d) .* finds no CUDA device there \(CUDA_VISIBLE_DEVICES='\1'\)"
    with pytest.raises(ConfigError, match=missing):
        ray_backend.restart(group.workers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_new_processes_start_if_a_standby_is_dead_or_does_not_answer(ray_backend, group, monkeypatch, number):
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 1.0)
    ray_backend.keep_standbys(group.workers)
    waiting = pids_of(standbys_of(ray_backend, group))
    os.kill(waiting[0], number)
    lose_and_restart(ray_backend, group)
    assert not {place[0] for place in group.place()} & set(waiting)
    assert group.add() == [4, 4]
    wait_until_ended(waiting)


def test_standbys_end_with_their_group(ray_backend):
    group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Counter, 3), backend=ray_backend)
    ray_backend.keep_standbys(group.workers)
    waiting = pids_of(standbys_of(ray_backend, group))
    group.shutdown()
    wait_until_ended(waiting)
    ray_backend.keep_standbys(group.workers)
    assert standbys_of(ray_backend, group) == []


MODULE = """
import os

from hybridflow.controller import Dispatch, Worker, register

AT_IMPORT = os.environ.get("HYBRIDFLOW_TEST_LEVEL")

class Reader(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def read(self):
        return AT_IMPORT, os.getpid(), sorted(self.colocated)
"""


def test_a_standby_imports_with_the_variables_of_its_pool(ray_backend, tmp_path, monkeypatch):
    (tmp_path / "reads_at_import.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    reader = ClassWithInitArgs(importlib.import_module("reads_at_import").Reader)
    pool = ResourcePool([1], environment={"HYBRIDFLOW_TEST_LEVEL": "3"})
    groups = spawn_colocated(pool, {"a": reader, "b": reader}, ray_backend)
    group = groups["a"]
    ray_backend.keep_standbys(group.workers)
    (standby,) = pids_of(standbys_of(ray_backend, group))
    os.kill(group.workers[0].process.home.address.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        group.read()
    assert ray_backend.settle(group.workers, 10) == group.workers
    ray_backend.restart(group.workers)
    assert group.read() == [("3", standby, ["a", "b"])]
    for each in groups.values():
        each.shutdown()
