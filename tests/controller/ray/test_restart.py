"""New processes for the groups that have failed, and standbys, which replace their ranks faster."""

import importlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from hybridflow.controller import (
    ClassWithInitArgs,
    Dispatch,
    ResourcePool,
    Worker,
    WorkerGroup,
    move_colocated,
    register,
    spawn_colocated,
)
from hybridflow.controller.ray import RayResourcePool
from hybridflow.controller.ray import standbys as module
from hybridflow.controller.ray.resource_pool import has_room, nodes_of_cluster
from hybridflow.errors import ConfigError, LostWorkerError, WorkerDiedError, WorkerError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.own_run("ray_two: its workers are killed, and py-spy looks at them"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc"),
]


class Counter(Worker):
    """Counts its calls; the constructor dies while the file `fatal` exists, which it removes."""

    def __init__(self, start: int, fatal: Path | None = None) -> None:
        self.count = start
        if fatal is not None and self.rank == 1 and fatal.exists():
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
    def place(self) -> tuple[int, str, str]:
        return os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"]

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
    with pytest.raises(WorkerDiedError, match=r"worker Counter/0 .* died before Counter\.add finished"):
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


@pytest.mark.exhaustive
def test_places_that_are_gone_are_lost_with_their_nodes(ray_backend, groups, monkeypatch):
    def full(**_):
        raise ConfigError("does not fit the cluster")

    monkeypatch.setattr(groups[1].workers[0].process.launch.pool, "take_tenancy", full)
    with pytest.raises(LostWorkerError, match="have not come back: does not fit"):
        ray_backend.restart(groups[1].workers)
    monkeypatch.undo()
    ray_backend.restart(groups[1].workers)
    assert groups[1].add() == [11]


# Standbys


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
    os.kill(group.workers[-1].process.home.address.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        group.add()
    assert backend.settle(group.workers, 10) == group.workers
    backend.restart(group.workers)


def test_standbys_take_the_places_of_the_ranks_and_end_with_them(ray_backend, group, wait_until_gone):
    ray_backend.keep_standbys(group.workers)
    waiting = pids_of(standbys_of(ray_backend, group))
    ray_backend.keep_standbys(group.workers)
    assert pids_of(standbys_of(ray_backend, group)) == waiting
    lose_and_restart(ray_backend, group)
    assert group.place() == [(waiting[0], "0", "2"), (waiting[1], "1", "2")]
    assert group.add() == [4, 4]
    assert standbys_of(ray_backend, group) == []
    ray_backend.keep_standbys(group.workers)
    waiting = pids_of(standbys_of(ray_backend, group))
    group.shutdown()
    wait_until_gone(waiting)
    ray_backend.keep_standbys(group.workers)
    assert standbys_of(ray_backend, group) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that the standby shall look for must not exist")
def test_standbys_take_over_the_gpus_of_the_lost_processes(ray_backend, group):
    ray_backend.keep_standbys(group.workers)
    for process, gpu in zip(group.workers[0].process.peers, "53", strict=True):
        process.home = replace(process.home, gpu_ids=(gpu,))
    missing = r"GPU (\d) .* finds no CUDA device there \(CUDA_VISIBLE_DEVICES='\1'\)"
    with pytest.raises(ConfigError, match=missing):
        ray_backend.restart(group.workers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_new_processes_start_if_a_standby_is_dead_or_does_not_answer(
    ray_backend, group, monkeypatch, wait_until_gone, number
):
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 1.0)
    ray_backend.keep_standbys(group.workers)
    waiting = pids_of(standbys_of(ray_backend, group))
    os.kill(waiting[0], number)
    lose_and_restart(ray_backend, group)
    assert not {place[0] for place in group.place()} & set(waiting)
    assert group.add() == [4, 4]
    wait_until_gone(waiting)


MODULE = """
import os
from hybridflow.controller import Dispatch, Worker, register

AT_IMPORT = os.environ.get("HYBRIDFLOW_TEST_LEVEL")

class Reader(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def add(self):
        return AT_IMPORT, os.getpid(), sorted(self.colocated)
"""


@pytest.mark.exhaustive
def test_a_standby_imports_with_the_variables_of_its_pool(ray_backend, tmp_path, monkeypatch):
    (tmp_path / "reads_at_import.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    reader = ClassWithInitArgs(importlib.import_module("reads_at_import").Reader)
    pool = ResourcePool([1], environment={"HYBRIDFLOW_TEST_LEVEL": "3"})
    groups = spawn_colocated(pool, {"a": reader, "b": reader}, ray_backend)
    group = groups["a"]
    ray_backend.keep_standbys(group.workers)
    (standby,) = pids_of(standbys_of(ray_backend, group))
    lose_and_restart(ray_backend, group)
    assert group.add() == [("3", standby, ["a", "b"])]
    for each in groups.values():
        each.shutdown()


# Groups that move to another pool


def pool_of(ranks: int, share: float = 1.0) -> RayResourcePool:
    return RayResourcePool([ranks], cpus_per_process=share)


@pytest.fixture
def cpus(ray_backend, wait_until):
    """Return the free CPUs of the cluster, which has one node, once those of earlier tests have come back."""
    created = [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]
    reserved = sum(bundle.get("CPU", 0) for group in created for bundle in group["bundles"].values())
    wait_until(lambda: nodes_of_cluster()[0].free.get("CPU") == nodes_of_cluster()[0].total["CPU"] - reserved)
    return nodes_of_cluster()[0].free["CPU"]


@pytest.mark.exhaustive
def test_colocated_groups_move_to_a_pool_of_another_size(ray_backend, cpus):
    share = cpus // 3
    roles = {"one": ClassWithInitArgs(Counter, 0), "two": ClassWithInitArgs(Counter, 10)}
    small, large = pool_of(1, share), pool_of(3, share)
    groups = spawn_colocated(small, roles, ray_backend)
    one, two = groups["one"], groups["two"]
    try:
        assert (one.add(), two.add()) == ([1], [11])
        assert has_room(large, small)
        assert not has_room(pool_of(4, share), small)
        before = one.workers
        (chosen,) = ray_backend.choose_fitting([[pool_of(4, share), large, small]], instead_of=one.workers)
        assert chosen is large
        move_colocated(groups, large, ray_backend)
        assert (one.world_size, two.world_size) == (3, 3)
        assert (one.add(), two.add()) == ([1, 1, 1], [11, 11, 11])
        assert len(set(one.pid())) == 3
        assert one.pid() == two.pid()
        assert one.mesh().axes == {"data": 3}
        assert not any(map(ray_backend.is_alive, before))
        with pytest.raises(LostWorkerError, match="have not come back"):
            ray_backend.choose_fitting([[pool_of(5, share), pool_of(4, share)]], instead_of=one.workers)
        ray_backend.restart(one.workers)  # the places are free, so the group can go on
        assert one.add() == [1, 1, 1]
    finally:
        one.shutdown()
        two.shutdown()
