"""Calls on a cluster: several at once, beside others, with unusual values; and the store of a process group."""

import gc
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridflow.controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalBackend,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
    spawn_colocated,
)
from hybridflow.controller.ray import RayBackend, RayResourcePool, RayWorkerGroup
from hybridflow.controller.ray.store import RayStore
from hybridflow.engines import join_process_group
from hybridflow.errors import DispatchError, WorkerError, WorkerTimeoutError
from hybridflow.protocol import DataProto
from hybridflow.runtime.rendezvous import group_store, new_store_name, open_store


class Engine(Worker):
    """Loads beside its calls, and sends unusual values."""

    second_thread_methods = frozenset({"load"})

    def __init__(self):
        self.loaded, self.condition = [], threading.Condition()

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("y",))
    def generate_after_loads(self, batch):
        """Wait until as many loads have come as the batch says."""
        wanted = int(batch.batch["x"].max())
        with self.condition:
            assert self.condition.wait_for(lambda: len(self.loaded) >= wanted, 120)
        return DataProto.from_dict({"y": batch.batch["x"]})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("x",))
    def load(self, batch):
        with self.condition:
            self.loaded.append(int(batch.batch["x"]))
            self.condition.notify_all()
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def state(self):
        return self.loaded, torch.get_num_threads()

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        threading.Event().wait(1000)

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def make(self, kind):
        return OpensIn(os.getpid()) if kind == "opens nowhere else" else bytes(8 * 2**20)

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("y",))
    def with_large_facts(self, batch):
        return DataProto.from_dict({"y": batch.batch["x"]}, meta_info={"facts": np.zeros(2**20)})


class Judge(Worker):
    concurrent_calls = 4

    def __init__(self):
        self.lock, self.running, self.most, self.four = threading.Lock(), 0, 0, threading.Barrier(4)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("y",))
    def judge(self, batch):
        return DataProto.from_dict({"y": batch.batch["x"] + 1})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("y",))
    def judge_with_three_others(self, batch):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.four.wait()
        time.sleep(0.1)  # a fifth call would arrive
        with self.lock:
            self.running -= 1
        return self.judge(batch)

    @register(Dispatch.ONE_TO_ALL)
    def at_the_same_time(self):
        return self.most, torch.get_num_threads()

    @register(Dispatch.ONE_TO_ALL)
    def meet(self):
        self.require_collectives("averaging")

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        time.sleep(1000)


class OpensIn:
    """An object that can be unpickled only in the process that made it."""

    def __init__(self, pid):
        self.pid = pid

    def __reduce__(self):
        return open_in, (self.pid,)


def open_in(pid):
    if os.getpid() != pid:
        raise ValueError(f"of process {pid}")
    return OpensIn(pid)


def batch_of(*numbers):
    return DataProto.from_dict({"x": torch.tensor(numbers)})


@pytest.fixture(scope="module")
def engine(ray_backend):
    with WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Engine), ray_backend, "engine") as group:
        yield group


# Several calls at once


@pytest.mark.ray
def test_calls_beside_run_in_order_while_other_calls_run_or_wait(ray_backend, engine):
    first = engine.generate_after_loads.remote(batch_of(3))
    loads = [engine.load.remote(batch_of(number)) for number in range(1, 4)]
    second = engine.generate_after_loads.remote(loads[-1])  # reads the result of a call beside
    assert int(second.get().batch["y"]) == 3
    assert int(first.get().batch["y"]) == 3
    assert engine.state() == [([1, 2, 3], ray_backend.threads or engine.state()[0][1])]


@pytest.mark.ray
def test_concurrent_calls_sets_the_number_of_simultaneous_calls(ray_backend):
    with WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Judge), ray_backend, "judge") as group:
        futures = [group.judge_with_three_others.remote(batch_of(number)) for number in range(8)]
        assert [int(future.get().batch["y"]) for future in futures] == list(range(1, 9))
        ((most, threads),) = group.at_the_same_time()
    assert most == 4
    assert threads == (ray_backend.threads or threads)


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.own_run("ray: its workers hang, and py-spy looks at them")
@pytest.mark.parametrize(("cls", "method"), [(Judge, "judge"), (Engine, "load")])
def test_a_result_is_readable_while_an_older_call_hangs_until_its_deadline(ray_backend, cls, method):
    with RayBackend(call_timeout_s=1.0) as backend:
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(cls), backend, "judge")
        hanging = group.hang.remote()
        backend.call_timeout_s = 120.0
        assert len(getattr(group, method)(batch_of(1))) == 1
        with pytest.raises(WorkerTimeoutError, match=rf"{cls.__name__}\.hang on judge, rank 0, has been running for"):
            hanging.get()


def test_in_one_process_calls_beside_run_one_after_another():
    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Engine), LocalBackend())
    group.load(batch_of(4, 5))
    assert [state[0] for state in group.state()] == [[4], [5]]


def test_the_local_backend_runs_concurrent_workers_at_once():
    with WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Judge), LocalBackend(), "judge") as group:
        assert int(group.judge.remote(batch_of(4)).get().batch["y"]) == 5
        with pytest.raises(WorkerError, match="runs 4 calls at the same time, in an order that differs between ranks"):
            group.meet()


def test_concurrent_classes_are_positive_and_alone_in_their_process():
    classes = {"judge": ClassWithInitArgs(Judge), "plain": ClassWithInitArgs(Worker)}
    with pytest.raises(DispatchError, match=r"cannot share a process with 'plain'.*give 'judge' a separate pool"):
        spawn_colocated(ResourcePool([1]), classes, LocalBackend())
    zero = ClassWithInitArgs(type("Zero", (Worker,), {"concurrent_calls": 0}))
    with pytest.raises(DispatchError, match=r"Zero\.concurrent_calls=0 is invalid: expected an integer of 1 or more"):
        WorkerGroup(ResourcePool([1]), zero)


# Unusual values


@pytest.mark.ray
def test_bytes_and_handles_arrive_unchanged(engine):
    for value in (b"", bytes(range(256)) * 1200, {"a": [None, (1, b"x")]}):
        handle = engine.backend.put(value)
        assert handle.get() == value
        assert engine.echo(value) == engine.execute_all_sync("echo", handle) == [value]


@pytest.mark.ray
def test_classes_of_a_script_are_sent_in_small_and_large_messages(engine):
    class Mine(DataProto):
        pass

    for rows in (4, 50_000):
        mine = Mine.from_dict({"x": torch.arange(rows)}, meta_info={"class": Mine, "function": lambda: 7})
        (back,) = engine.echo(mine)
        assert (type(back), len(back), back.meta_info["class"], back.meta_info["function"]()) == (Mine, rows, Mine, 7)
        future = engine.with_large_facts.remote(batch_of(*range(rows))).with_meta_info({"function": lambda: 7})
        assert len(engine.with_large_facts(future.rename("y", "x"))) == rows


@pytest.mark.ray
def test_error_for_an_unreadable_result_names_its_method(engine):
    says = r"the result of Engine\.make cannot be unpickled in this process: ValueError: of "
    with pytest.raises(WorkerError, match=says):
        engine.make("opens nowhere else")
    assert engine.echo(1) == [1]


@pytest.mark.ray
def test_a_future_with_hundreds_of_operations_can_be_sent(engine):
    engine.backend.trace.take()
    future = engine.with_large_facts.remote(batch_of(0, 1))
    for _ in range(600):
        future = future.rename("y", "x").rename("x", "y")
    assert engine.with_large_facts(future.rename("y", "x")).batch["y"].tolist() == [0, 1]
    (handle,) = future.handles()
    assert handle.call.small_value is None  # meta_info counts in the size of a result
    events = [e for e in engine.backend.trace.take() if e.method == "with_large_facts" and e.kind == "call"]
    assert min(event.bytes_out for event in events) > 2**23


@pytest.mark.ray
def test_results_of_calls_without_a_wait_are_released(engine):
    import ray

    values = [engine.make.remote("large").futures[0].value for _ in range(70)]
    engine.echo(1)  # all have finished
    values += [engine.make.remote("large").futures[0].value for _ in range(64)]
    assert len(engine.workers[0].process.unfinished) <= 64
    engine.echo(1)
    held = [call.done for call in engine.workers[0].process.unfinished]
    assert all(len(frozen) < 10_000 for frozen in ray.get(held))  # all are status objects, not results
    del values
    gc.collect()


@pytest.mark.ray
def test_compressed_batches_are_smaller_on_their_way(ray_backend):
    batch = DataProto.from_dict({"x": torch.arange(4).repeat_interleave(50_000).reshape(4, -1)})
    with RayBackend(compress=True) as backend:  # on the cluster that the process is connected to
        group = WorkerGroup(RayResourcePool([1]), ClassWithInitArgs(Engine), backend)
        future = group.with_large_facts.remote(batch)
        assert torch.equal(future.get("y").batch["y"], batch.batch["x"])
        events = backend.trace.take()
    assert 0 < sum(event.bytes_out for event in events if event.kind == "send") < batch.batch["x"].nbytes / 20


@pytest.mark.ray
def test_a_class_that_is_not_a_worker_does_not_break_the_backend(ray_backend, engine):
    with WorkerGroup(ResourcePool([1]), ClassWithInitArgs(dict), ray_backend, "dict"):
        pass
    assert engine.echo(1) == [1]


def test_a_class_without_init_args_is_an_error():
    with pytest.raises(DispatchError, match=r"ClassWithInitArgs\(Engine\)"):
        WorkerGroup(ResourcePool([1]), Engine)  # pyright: ignore
    with pytest.raises(DispatchError, match=r"RayClassWithInitArgs\(Engine\)"):
        RayWorkerGroup(RayResourcePool([1]), Engine, backend=RayBackend())  # pyright: ignore


# The store of a process group


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
        interfaces = os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]
        return interfaces, int(os.environ["MASTER_PORT"])

    @register(Dispatch.RANK_ZERO)
    def write(self):
        name = new_store_name()
        open_store(name).set("key", "value of rank 0")
        return name

    @register(Dispatch.ONE_TO_ALL)
    def read(self, name):
        return open_store(name).get("key").decode()


@pytest.mark.ray
def test_ranks_share_stores_and_no_port_until_their_backend_closes(ray_backend):
    with RayBackend() as backend:  # on the cluster that this process is connected to
        ranks = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Rank), backend=backend)
        assert ranks.total() == [6, 6]
        for interfaces, port in ranks.environment():
            assert interfaces == ("lo", "=lo")
            with socket.socket() as sock:
                assert sock.connect_ex(("127.0.0.1", port)) != 0  # nothing listens there
        name = ranks.write()
        assert ranks.read(name) == ["value of rank 0"] * 2
        assert RayStore(name).check(["key"])
    assert not RayStore(name).check(["key"])


@pytest.mark.ray
def test_a_store_keeps_values_and_counts_concurrent_additions(ray_backend):
    store = RayStore("of this test")
    store.set("key", b"\x00\xff")
    assert store.get("key") == b"\x00\xff"
    assert store.delete_key("key")
    assert not store.delete_key("key")
    assert not store.check(["key"])
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda amount: store.add("n", amount), [1] * 40))
    assert sorted(sums) == list(range(1, 41))
    assert store.add("n", -5) == 35
    assert store.check(["n"])
    assert not store.check(["n", "other"])
    with pytest.raises(dist.DistStoreError, match="no process has set missing within the time limit"):
        store.wait(["n", "missing"], timedelta(milliseconds=10))
