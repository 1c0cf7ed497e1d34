"""The store of a process group in the cluster's key-value storage, and the interface on which a group listens."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend
from hybridflow.controller.ray.interfaces import own_interface
from hybridflow.controller.ray.store import RayStore
from hybridflow.engines import join_process_group
from hybridflow.runtime import group_store, new_store_name, open_store

pytestmark = pytest.mark.ray


class Rank(Worker):
    def __init__(self):
        join_process_group(self.rank, self.world_size, group_store(), timeout_s=300)

    @register(Dispatch.ONE_TO_ALL)
    def total(self):
        total = torch.tensor(self.rank + 1)
        dist.all_reduce(total)
        group = dist.new_group(backend="gloo")  # a later group needs the store again
        dist.all_reduce(total, group=group)
        return int(total)

    @register(Dispatch.ONE_TO_ALL)
    def environment(self):
        return os.environ["GLOO_SOCKET_IFNAME"], int(os.environ["MASTER_PORT"])

    @register(Dispatch.RANK_ZERO)
    def write(self):
        name = new_store_name()
        open_store(name).set("key", "value of rank 0")
        return name

    @register(Dispatch.ONE_TO_ALL)
    def read(self, name):
        return open_store(name).get("key").decode()


@pytest.fixture(scope="module")
def ranks(ray_backend):
    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Rank), backend=ray_backend)
    yield group
    group.shutdown()


def test_ranks_meet_without_a_port_of_their_own(ranks):
    assert ranks.total() == [6, 6]
    for interface, port in ranks.environment():
        assert interface == "lo"
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", port)) != 0  # nothing listens there


def test_ranks_that_open_the_same_name_share_a_store(ranks):
    assert ranks.read(ranks.write()) == ["value of rank 0"] * 2


def test_a_missing_key_is_an_error_after_the_timeout(ray_backend, ranks):
    with pytest.raises(dist.DistStoreError, match="no process has set missing within the time limit"):
        RayStore("lonely").wait(["missing"], timedelta(milliseconds=10))


def test_concurrent_additions_are_all_counted(ray_backend, ranks):
    store = RayStore("sums")
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda amount: store.add("n", amount), [1] * 40))
    assert sorted(sums) == list(range(1, 41))
    assert store.add("n", -5) == 35
    assert store.check(["n"])
    assert not store.check(["n", "other"])


def test_a_deleted_key_is_gone(ray_backend, ranks):
    store = RayStore("deleted")
    store.set("key", b"\x00\xff")
    assert store.get("key") == b"\x00\xff"
    assert store.delete_key("key")
    assert not store.delete_key("key")
    assert not store.check(["key"])


def test_closing_a_backend_deletes_its_stores(ray_backend, ranks):
    with RayBackend() as backend:  # on the cluster that this process is connected to
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Rank), backend=backend)
        name = group.write()
        assert RayStore(name).check(["key"])
    assert not RayStore(name).check(["key"])


def test_the_interface_of_an_address_is_found():
    assert own_interface("127.0.0.1") == "lo"
    assert own_interface("192.0.2.1") == ""  # reserved for documentation
