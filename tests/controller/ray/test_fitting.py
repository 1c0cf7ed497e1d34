"""Pools that are chosen by the room that a cluster has, and groups that move to them."""

import os
import time

import pytest

from hybridflow.controller import ClassWithInitArgs, Dispatch, Worker, move_colocated, register, spawn_colocated
from hybridflow.controller.ray import RayResourcePool, backend
from hybridflow.controller.ray.links import Link
from hybridflow.controller.ray.nodes import Node
from hybridflow.controller.ray.resource_pool import has_room, nodes_of_cluster
from hybridflow.errors import ConfigError, LostWorkerError


class Counter(Worker):
    """Counts its calls."""

    def __init__(self, start: int) -> None:
        self.count = start

    @register(Dispatch.ONE_TO_ALL)
    def add(self) -> int:
        self.count += 1
        return self.count

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


def pool_of(ranks: int, share: float = 1.0) -> RayResourcePool:
    return RayResourcePool([ranks], cpus_per_process=share)


def test_a_node_gets_resources_back_that_it_did_not_name():
    node = Node("id", "127.0.0.1", {}, {"CPU": 2.0}).without(-2, {"CPU": 0.5})
    assert node.free == {"CPU": 1.0}


@pytest.fixture
def cpus(ray_backend):
    """Return the CPUs of the cluster, which has one node, when all are free."""
    ray_backend.check_fit([pool_of(1, 0.01)])
    deadline = time.monotonic() + 60
    while True:
        (node,) = nodes_of_cluster()
        if node.free.get("CPU") == node.total["CPU"] or time.monotonic() > deadline:
            return node.total["CPU"]
        time.sleep(0.1)


@pytest.mark.ray
@pytest.mark.slow
def test_colocated_groups_move_to_a_pool_of_another_size(ray_backend, cpus):
    share = cpus / 3
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


@pytest.mark.ray
@pytest.mark.slow
def test_several_pools_are_chosen_such_that_all_fit(ray_backend, cpus):
    share = cpus / 4
    options = [[pool_of(n, share) for n in sizes] for sizes in ((3, 2, 1), (3, 2, 1))]
    assert [pool.world_size for pool in ray_backend.choose_fitting(options)] == [3, 1]
    with pytest.raises(ConfigError, match="does not fit the cluster"):
        ray_backend.choose_fitting([[pool_of(5, share)]])


@pytest.mark.ray
@pytest.mark.slow
def test_after_a_loss_nodes_that_were_slow_at_the_start_are_used_last(ray_backend, cpus, monkeypatch):
    """Only the measured links are made up, since the cluster has one node; a loss does not measure them again."""
    links, measured = {"slow": Link(0.05, 1e9), "fast": Link(0.0005, 1e9)}, []
    monkeypatch.setattr(backend, "measure_links", lambda nodes: measured.append(nodes) or links)
    monkeypatch.setattr(ray_backend, "_prefer_fast_links", True)
    share = cpus / 2
    (pool,) = ray_backend.choose_fitting([[pool_of(1, share)]])
    assert pool.used_last == {"slow"}
    group = spawn_colocated(pool, {"one": ClassWithInitArgs(Counter, 0)}, ray_backend)["one"]
    measured.clear()
    try:
        (chosen,) = ray_backend.choose_fitting([[pool_of(1, share)]], instead_of=group.workers)
        assert (chosen.used_last, measured) == ({"slow"}, [])
    finally:
        group.shutdown()
