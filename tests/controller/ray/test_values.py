"""Arguments and results other than plain batches: bytes, classes of a script, futures, unusual errors."""

import asyncio
import gc
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, Dispatch, LocalBackend, ResourcePool, Worker, WorkerGroup, register
from hybridflow.errors import BatchError, ConfigError, DispatchError, WorkerError
from hybridflow.protocol import DataProto
from hybridflow.protocol.packed_batch import PackedColumn

LARGE = 300_000


class Stopped(BaseException):
    """An error that is neither an Exception nor an interrupt."""


class Echo(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def make(self, kind):
        values = {"opens nowhere else": OpensIn(os.getpid()), "large": bytes(8 * 2**20)}
        return values[kind]

    @register(Dispatch.ONE_TO_ALL)
    def stop(self, kind):
        raise {"cancelled": asyncio.CancelledError, "generator": GeneratorExit, "own": Stopped}[kind]("enough")

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("y",))
    def with_large_facts(self, batch):
        return DataProto.from_dict({"y": batch.batch["x"]}, meta_info={"facts": np.zeros(2**20)})


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


@pytest.fixture(scope="module")
def ray_group(ray_backend):
    with WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), ray_backend, "echo") as group:
        yield group


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def group(request):
    if request.param == "ray":
        return request.getfixturevalue("ray_group")
    return WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), LocalBackend(), "echo")


BYTES = [b"", b"abc", pickle.dumps({"not": "opened"}), bytes(range(256)) * (LARGE // 256)]


@pytest.mark.parametrize("value", BYTES, ids=["empty", "few", "a pickle", "many"])
def test_bytes_are_sent_unchanged_and_never_unpickled(group, value):
    assert group.echo(value) == [value]
    handle = group.backend.put(value)
    assert handle.get() == value
    assert group.execute_all_sync("echo", handle) == [value]


def test_none_and_nested_values_return_unchanged(group):
    value = {"a": [None, (1, b"x"), DataProto.from_dict({"x": torch.ones(2)})]}
    (back,) = group.echo(value)
    assert back["a"][:2] == [None, (1, b"x")]
    assert back["a"][2].batch["x"].tolist() == [1, 1]
    assert group.echo(None) == [None]


SCRIPT = """
import torch
from hybridflow.controller import ClassWithInitArgs, Dispatch, LocalBackend, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend
from hybridflow.protocol import DataProto

class Mine(DataProto):
    pass

class Fact:
    def __init__(self, number):
        self.number = number

class Echo(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch):
        assert type(batch).__name__ == "Mine"
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("x",))
    def same(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] + batch.meta_info.get("fact", Fact(0)).number})

for backend in (LocalBackend(), RayBackend(num_cpus=1, object_store_bytes=80 * 2**20)):
    group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), backend)
    for rows in (4, 50_000):
        back = group.echo(Mine.from_dict({"x": torch.arange(rows)}))
        assert type(back) is Mine and len(back) == rows
        future = group.same.remote(DataProto.from_dict({"x": torch.arange(rows)}))
        again = group.same(future.with_meta_info({"fact": Fact(2), "function": lambda: 1}))
        assert again.batch["x"].tolist() == list(range(2, rows + 2))
    backend.close()
print("all came back")
"""


@pytest.mark.ray
@pytest.mark.slow
def test_classes_of_a_script_are_sent_in_small_and_large_messages():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, check=False)
    assert "all came back" in done.stdout, done.stderr[-2000:]


@pytest.mark.ray
def test_error_for_an_unreadable_result_names_its_method(ray_group):
    with pytest.raises(
        WorkerError, match=r"the result of Echo\.make cannot be unpickled in this process: ValueError: of "
    ):
        ray_group.make("opens nowhere else")
    assert ray_group.echo(1) == [1]


@pytest.mark.ray
def test_a_future_with_hundreds_of_operations_can_be_sent(ray_group):
    future = ray_group.with_large_facts.remote(DataProto.from_dict({"x": torch.arange(2)}))
    for _ in range(600):
        future = future.rename("y", "x").rename("x", "y")
    assert ray_group.with_large_facts(future.rename("y", "x")).batch["y"].tolist() == [0, 1]


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["cancelled", "generator", "own"])
def test_a_base_exception_of_a_worker_is_a_worker_error(ray_group, kind):
    with pytest.raises(WorkerError, match=r"^Echo\.stop failed on worker echo/0: \w+: enough$"):
        ray_group.stop(kind)
    assert ray_group.echo(1) == [1]


@pytest.mark.ray
def test_meta_info_counts_in_the_size_of_a_result(ray_group):
    ray_group.backend.trace.take()
    future = ray_group.with_large_facts.remote(DataProto.from_dict({"x": torch.arange(4)}))
    future.get()
    (handle,) = future.handles()
    assert handle.call.small_value is None
    (event,) = (e for e in ray_group.backend.trace.take() if e.method == "with_large_facts" and e.kind == "call")
    assert event.bytes_out > 2**23


@pytest.mark.ray
def test_results_of_calls_without_a_wait_are_released(ray_group):
    import ray

    ray_group.backend.trace.take()
    values = [ray_group.make.remote("large").futures[0].value for _ in range(70)]
    ray_group.echo(1)  # all have finished
    values += [ray_group.make.remote("large").futures[0].value for _ in range(64)]
    assert len(ray_group.workers[0].process.unfinished) <= 64
    ray_group.echo(1)
    held = [call.done for call in ray_group.workers[0].process.unfinished]
    assert all(len(frozen) < 10_000 for frozen in ray.get(held))  # all are status objects, not results
    del values
    gc.collect()


AFTER_THE_END = """
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend
from hybridflow.controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from hybridflow.errors import ConfigError, WorkerError

class Echo(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

backend = RayBackend(num_cpus=1, object_store_bytes=80 * 2**20)
try:
    RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Echo), "kept", backend=backend, detached=True)
except ConfigError as error:
    print("refused" if "cannot outlive this process, because its local cluster stops with it" in str(error) else error)
group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), backend, "echo")
read, unread = group.execute_all("echo", 1), group.execute_all("echo", 2)
assert backend.get(read) == [1]
backend.close()
backend.wait(read)
backend.wait([])
for late in (read, unread):
    try:
        backend.get(late)
    except WorkerError as error:
        print("closed" if "this backend was closed" in str(error) else error)
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_closed_backend_neither_reconnects_nor_detaches_groups(fork_server):
    process = fork_server.start(["-c", AFTER_THE_END], environment=os.environ)
    output, errors = process.communicate(timeout=120)
    assert output.split() == ["refused", "closed", "closed"], errors[-2000:]


@pytest.mark.ray
def test_a_class_that_is_not_a_worker_does_not_break_the_backend(ray_backend):
    with WorkerGroup(ResourcePool([1]), ClassWithInitArgs(dict), ray_backend, "dict"):
        pass
    with WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), ray_backend, "echo") as group:
        assert group.echo(1) == [1]


def test_a_class_without_init_args_is_an_error():
    with pytest.raises(DispatchError, match=r"ClassWithInitArgs\(Echo\)"):
        WorkerGroup(ResourcePool([1]), Echo)  # pyright: ignore


@pytest.mark.ray
def test_a_class_without_init_args_is_an_error_on_ray(ray_backend):
    from hybridflow.controller.ray import RayResourcePool, RayWorkerGroup

    with pytest.raises(DispatchError, match=r"RayClassWithInitArgs\(Echo\)"):
        RayWorkerGroup(RayResourcePool([1]), Echo, backend=ray_backend)
    with pytest.raises(DispatchError, match=r"RayClassWithInitArgs\(Echo\)"):
        RayWorkerGroup.attach("missing", Echo, backend=ray_backend)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_cannot_be_a_packed_column():
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    with pytest.raises(BatchError, match="dequantize"):
        PackedColumn.of_tensor(quantized)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_argument_is_sent_unchanged(group):
    quantized = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.1, 0, torch.qint8)
    (back,) = group.echo(quantized)
    assert back.dequantize().tolist() == pytest.approx([0.5, 1.0])


@pytest.mark.ray
def test_connecting_to_a_lost_cluster_is_an_error(monkeypatch):
    from hybridflow.controller.ray.cluster import Connection

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"address='auto', the last cluster started here: 127\.0\.0\.1:1"):
        Connection("auto", 0, 0, None).open([])
