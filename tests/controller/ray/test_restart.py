"""New processes for the groups that have failed; the references to their workers stay valid."""

import os
import signal
import sys
from pathlib import Path

import pytest

from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.errors import ConfigError, LostWorkerError, WorkerDiedError, WorkerError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")]


class Counter(Worker):
    """Counts its calls; the constructor dies while the file `fatal` exists, which it removes."""

    def __init__(self, start: int, fatal: Path) -> None:
        self.count = start
        if self.rank == 1 and fatal.exists():
            fatal.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    @register(Dispatch.ONE_TO_ALL)
    def add(self) -> int:
        self.count += 1
        return self.count

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise ValueError("no")


@pytest.fixture(scope="module")
def fatal(tmp_path_factory):
    return tmp_path_factory.mktemp("fatal") / "file"


@pytest.fixture(scope="module")
def groups(ray_backend, fatal):
    """Yield a group of two ranks and one of one rank."""
    both = [
        WorkerGroup(ResourcePool([ranks]), ClassWithInitArgs(Counter, start, fatal), backend=ray_backend)
        for ranks, start in ((2, 0), (1, 10))
    ]
    yield both
    for group in both:
        group.shutdown()


def test_only_the_group_of_a_dead_process_is_restarted_as_a_whole(ray_backend, groups):
    first, second = groups
    first.add()
    (count,) = second.add()
    dead, kept = first.pid(), second.pid()
    os.kill(dead[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        first.add()
    assert ray_backend.settle([*first.workers, *second.workers], 10) == first.workers
    ray_backend.restart(first.workers)
    assert [first.add(), second.add()] == [[1, 1], [count + 1]]
    assert not set(first.pid()) & set(dead)
    assert second.pid() == kept


def test_a_death_during_a_restart_can_be_answered_by_another_restart(ray_backend, groups, fatal):
    """Also after an error of a method, which may leave its ranks out of step."""
    first, second = groups
    fatal.touch()
    os.kill(first.pid()[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="ValueError: no"):
        second.fail()
    workers = [*first.workers, *second.workers]
    assert ray_backend.settle(workers, 10) == workers
    with pytest.raises(WorkerDiedError, match="__init__"):
        ray_backend.restart(workers)
    assert ray_backend.settle(workers, 10) == workers
    ray_backend.restart(workers)
    assert [first.add(), second.add()] == [[1, 1], [11]]


def test_workers_of_another_process_cannot_be_restarted(ray_backend, groups, monkeypatch):
    (worker, *_) = groups[0].workers
    monkeypatch.setattr(worker.process, "launch", None)
    with pytest.raises(WorkerError, match="was not started by this backend"):
        ray_backend.restart([worker])


def test_places_that_are_gone_are_lost_with_their_nodes(ray_backend, groups, monkeypatch):
    def full(**_):
        raise ConfigError("does not fit the cluster")

    monkeypatch.setattr(groups[1].workers[0].process.launch.pool, "take_tenancy", full)
    with pytest.raises(LostWorkerError, match="have not come back: does not fit"):
        ray_backend.restart(groups[1].workers)
    monkeypatch.undo()
    ray_backend.restart(groups[1].workers)
    assert groups[1].add() == [11]
