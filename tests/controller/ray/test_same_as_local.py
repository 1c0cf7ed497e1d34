"""Equivalence of Ray and local backend: the same calls return results that are equal byte for byte.

Four ranks hold two roles of the same class, `model` and `twin`; two other ranks are `pair`.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.controller import (
    DISPATCH_MODES,
    ClassWithInitArgs,
    Dispatch,
    Execute,
    LocalBackend,
    ResourcePool,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    spawn_colocated,
)
from hybridflow.errors import DispatchError, FieldError, HybridFlowError
from hybridflow.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor

pytestmark = pytest.mark.ray

on_grid_mode = make_nd_compute_dataproto_dispatch_fn(mesh_name="grid", split_axes=("data",))
on_pipeline_mode = make_nd_compute_dataproto_dispatch_fn(mesh_name="pipelined", split_axes=("data",))
on_both_axes_mode = make_nd_compute_dataproto_dispatch_fn(mesh_name="grid", split_axes=("tensor", "data"))
MESHES = {
    "default": {"data": 2, "tensor": 2},
    "grid": {"data": 2, "tensor": 2, "pipeline": 1},
    "pipelined": {"data": 2, "pipeline": 2},
}
last_part_first = register_dispatch_mode(
    "LAST_PART_FIRST_ON_RAY",
    dispatch_fn=lambda group, batch: ([batch.chunk(group.world_size)[::-1]], {}),
    collect_fn=lambda group, outputs: DataProto.concat(outputs[::-1]),
    num_parts=lambda group: group.world_size,
)
del DISPATCH_MODES["LAST_PART_FIRST_ON_RAY"]  # other tests read the table


class Model(Worker):
    def __init__(self, factor=2):
        self.factor = factor
        self.received = []

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch, *others, **named):
        self.received.append((batch, others, named))
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("doubled",))
    def double(self, batch, *, plus=0):
        self.received.append(batch)
        return DataProto.from_dict({"doubled": batch.batch["x"] * self.factor + plus})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=("doubled",))
    def double_later(self, batch):
        return DataProto.from_dict({"doubled": batch.batch["x"] * self.factor})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x", "names"), writes=("x", "ranks", "infos"))
    def describe(self, batch):
        infos = [{"name": name, "numbers": [self.rank]} for name in batch.non_tensor_batch["names"]]
        ranks = torch.full((len(batch),), self.rank)
        return DataProto.from_dict({"x": batch.batch["x"], "ranks": ranks}, {"infos": infos}, {"made_by": "describe"})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("responses", "response_mask", "names"))
    def respond(self, batch):
        """Return responses of one token on rank 0, two tokens on rank 1, ..."""
        tokens = batch.batch["x"][:, None].expand(-1, self.rank + 1)
        names = [str(value) for value in batch.batch["x"].tolist()]
        return DataProto.from_dict({"responses": tokens, "response_mask": tokens > 0}, {"names": names})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("x",), rows=3)
    def thrice(self, batch):
        return batch.repeat(3, interleave=False)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=(), rows="one")
    def update(self, batch):
        return DataProto(meta_info={"metrics": {"loss": float(batch.batch["x"].sum()), "rank": [self.rank]}})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def silent(self, batch):
        return None

    @register(Dispatch.DP_COMPUTE_PROTO, reads=())
    def count(self, batch):
        self.received.append(batch)
        return DataProto(meta_info={"metrics": {"rows": len(batch)}})

    @register(Dispatch.DP_COMPUTE)
    def each(self, batch, other=None):
        return batch, other, self.rank

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metric(self, batch, scale=1.0):
        return {"sum": float(batch.batch["x"].sum()) * scale, "rank": self.rank}

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function, batch):
        return DataProto.from_dict({"x": function(batch.batch["x"]), "rank": batch.batch["x"] * 0 + self.rank})

    @register(Dispatch.MEGATRON_COMPUTE)
    def on_data_axis_each(self, batch, other):
        return batch, other, self.rank

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def on_data_axis(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] * 10 + self.rank})

    @register(Dispatch.TP_FORWARD, reads=("x",), writes=("y",))
    def forward(self, batch):
        return DataProto.from_dict({"y": batch.batch["x"] * 10 + self.rank})

    @register(on_grid_mode)
    def on_grid(self, batch):
        self.received.append(batch)
        return DataProto.from_dict({"x": batch.batch["x"] * 10 + self.rank})

    @register(on_pipeline_mode, reads=("x",), writes=("y",))
    def on_pipeline(self, batch):
        return DataProto.from_dict({"y": batch.batch["x"] * 10 + self.rank})

    @register(on_both_axes_mode)
    def on_both_axes(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] * 10 + self.rank})

    @register(on_grid_mode, reads=("x",), writes=("y",))
    def fail_on_rank_one(self, batch):
        if self.rank == 1:
            raise ValueError("rank 1 is unlucky")
        return DataProto.from_dict({"y": batch.batch["x"]})

    @register(last_part_first)
    def from_last_part(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] * 10 + self.rank})

    @register(last_part_first, writes=("x",))
    def declared_from_last_part(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] * 10 + self.rank})

    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, value, key=None):
        return self.rank, value, key

    @register(Dispatch.ONE_TO_ALL)
    def broadcast(self, value, key=None):
        self.received.append(value)
        return self.rank, value, key

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, value, key=None):
        return self.rank, value, key

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.SEQUENTIAL)
    def in_turn(self, value):
        return self.rank, value

    @register(Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.SEQUENTIAL, reads=("x",), writes=("x",))
    def split_in_turn(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] * 10 + self.rank})

    @register()
    def exchange(self, value, other=None):
        return self.rank, value, other

    @register(Dispatch.DP_COMPUTE_PROTO, materialize_futures=False, reads=("doubled",))
    def read_future(self, future):
        assert isinstance(future, DataProtoFuture)
        batch = future.get()
        batch.batch["doubled"] += self.rank
        return batch

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def read_whole_future(self, future):
        return self.rank, future.get()

    @register(Dispatch.DP_COMPUTE_METRIC, materialize_futures=False)
    def length_of_future(self, future):
        return len(future)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, first, second):
        return DataProto.from_dict({"sum": first.batch["x"] + second.batch["y"]})

    @register(Dispatch.ONE_TO_ALL)
    def scribble(self, batch, value=None):
        """Write into all received values in place, and return them."""
        for name in batch.batch.keys():  # noqa: SIM118 (a TensorDict)
            batch.batch[name].zero_()
        for column in batch.non_tensor_batch.values():
            for entry in column:
                entry["numbers"].append("scribbled")
        batch.meta_info["scribbled"] = True
        if value is not None:
            value["array"][:] = 0
            value["tensor"].zero_()
            value["list"].clear()
        return batch, value

    @register(Dispatch.ONE_TO_ALL)
    def forget(self):
        received, self.received = self.received, []
        return received

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("large",))
    def enlarge(self, batch):
        return DataProto.from_dict({"large": torch.ones(len(batch), 256, 1024)})

    @register(Dispatch.ONE_TO_ALL)
    def hold(self, value, directory):
        Path(directory, str(self.rank)).touch()
        while not Path(directory, "release").exists():
            time.sleep(0.01)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("y",))
    def wrong_columns(self, batch):
        return batch


@dataclass(frozen=True)
class Groups:
    backend: Any
    model: WorkerGroup
    twin: WorkerGroup
    pair: WorkerGroup


@dataclass(frozen=True)
class Both:
    local: Groups
    ray: Groups


@pytest.fixture(scope="module")
def both(ray_backend) -> Iterator[Both]:
    from hybridflow.controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )

    roles = {"model": RayClassWithInitArgs(Model), "twin": RayClassWithInitArgs(Model, factor=7)}
    fused = RayWorkerGroup(RayResourcePool([4]), create_colocated_worker_cls(roles), backend=ray_backend)
    on_ray = fused.spawn(roles, {"model": MESHES, "twin": MESHES})
    pair = {"pair": ClassWithInitArgs(Model, factor=5)}
    on_ray |= spawn_colocated(RayResourcePool([2]), pair, ray_backend)
    here = LocalBackend()
    groups = spawn_colocated(ResourcePool([4]), roles, here, {"model": MESHES, "twin": MESHES})
    groups |= spawn_colocated(ResourcePool([2]), pair, here)
    yield Both(Groups(here, **groups), Groups(ray_backend, **on_ray))
    for group in (*on_ray.values(), fused):
        group.shutdown()


def canonical(value: Any) -> Any:
    """Return a value as types, shapes and bytes, which are equal only for indistinguishable values."""
    if isinstance(value, DataProto):
        tensors = None if value.batch is None else canonical(dict(value.batch.items()))
        arrays, meta_info = canonical(value.non_tensor_batch), canonical(value.meta_info)
        return type(value), len(value), tensors, arrays, meta_info, value.auto_padding
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1)
        raw = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
        return type(value), value.dtype, value.requires_grad, tuple(value.shape), raw
    if isinstance(value, np.ndarray):
        entries = value.dtype.hasobject or value.dtype.fields  # padding bytes between fields are undefined
        raw = [canonical(entry) for entry in value.flat] if entries else value.tobytes()
        return type(value), value.dtype, value.shape, raw
    if isinstance(value, dict):
        return type(value), [(key, canonical(element)) for key, element in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [canonical(element) for element in value]
    return type(value), repr(value)


def same_on_both(both: Both, program: Callable[[Groups], Any]) -> Any:
    """Check that the program returns the same on Ray and locally, and return it; received values are cleared first."""
    for group in (both.local.model, both.local.twin, both.local.pair, both.ray.model, both.ray.twin, both.ray.pair):
        group.forget()
    here, there = program(both.local), program(both.ray)
    assert canonical(here) == canonical(there)
    return there


def rich_batch(num_rows: int) -> DataProto:
    """Return a new batch with columns of every kind."""
    x = torch.arange(1, num_rows + 1)
    return DataProto.from_dict(
        {
            "x": x,
            "row_ids": x - 1,
            "halves": (x / 2).to(torch.bfloat16),
            "bools": x % 2 == 0,
            "waves": torch.complex(x.float(), -x.float()),
            "strided": torch.arange(num_rows * 6, dtype=torch.float32).reshape(num_rows, 6)[:, ::2],
            "expanded": torch.tensor([[7, 8]]).expand(num_rows, 2),
            "no_width": torch.zeros(num_rows, 0),
        },
        {
            "names": np.array([f"row {row}" for row in range(num_rows)]),
            "infos": [{"row": row, "numbers": [row, None]} for row in range(num_rows)],
            "days": np.datetime64("2024-02-28") + np.arange(num_rows),
            "records": np.array([(row, row / 4) for row in range(num_rows)], dtype=[("a", "i2"), ("b", "f8")]),
            "small": np.arange(num_rows * 2, dtype=np.int8).reshape(num_rows, 2),
        },
        {"step": 3, "nested": {"list": [1, 2.5]}, "array": np.arange(3), "tensor": torch.ones(2)},
    )


def batch_of(*values: int) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(values)}, {"names": [f"name {value}" for value in values]})


# Dispatch and execute modes

CALLS: dict[str, Callable[[Callable[[str], Callable], DataProto], Any]] = {
    "DP_COMPUTE_PROTO": lambda call, batch: call("echo")(batch),
    "DP_COMPUTE_PROTO by keyword": lambda call, batch: call("echo")(batch=batch, named={"a": (1, None)}),
    "DP_COMPUTE_PROTO with others": lambda call, batch: call("echo")(batch, 1, "two", np.float32(3), [torch.ones(1)]),
    "DP_COMPUTE_PROTO that declares": lambda call, batch: call("double")(batch=batch, plus=1),
    "DP_COMPUTE_PROTO with objects": lambda call, batch: call("describe")(batch),
    "DP_COMPUTE_PROTO of ranks with different lengths": lambda call, batch: call("respond")(batch),
    "DP_COMPUTE_PROTO with three rows for one": lambda call, batch: call("thrice")(batch),
    "DP_COMPUTE_PROTO with metrics alone": lambda call, batch: call("update")(batch),
    "DP_COMPUTE_PROTO with nothing": lambda call, batch: call("silent")(batch),
    "DP_COMPUTE_PROTO that reads no column": lambda call, batch: call("count")(batch),
    "DP_COMPUTE_PROTO of two batches": lambda call, batch: call("add")(second=batch.rename("x", "y"), first=batch),
    "DP_COMPUTE_PROTO in turn": lambda call, batch: call("split_in_turn")(batch),
    "DP_COMPUTE": lambda call, batch: call("each")(batch, ["a", 1, None, (2, 3)]),
    "DP_COMPUTE_METRIC": lambda call, batch: call("metric")(batch, scale=0.5),
    "DP_COMPUTE_PROTO_WITH_FUNC": lambda call, batch: call("apply")(lambda x: x + 1, batch),
    "MEGATRON_COMPUTE": lambda call, batch: call("on_data_axis_each")(batch, ["a", "b"]),
    "MEGATRON_COMPUTE_PROTO": lambda call, batch: call("on_data_axis")(batch),
    "TP_FORWARD": lambda call, batch: call("forward")(batch),
    "a mesh of three axes": lambda call, batch: call("on_grid")(batch),
    "two axes of a mesh": lambda call, batch: call("on_both_axes")(batch),
    "a pipeline": lambda call, batch: call("on_pipeline")(batch),
    "a registered mode": lambda call, batch: call("from_last_part")(batch),
    "a registered mode that declares": lambda call, batch: call("declared_from_last_part")(batch),
    "RANK_ZERO": lambda call, batch: call("rank_zero")(batch, key=["k"]),
    "ONE_TO_ALL": lambda call, batch: call("broadcast")(batch, key=np.arange(3)),
    "ONE_TO_ALL of a list": lambda call, batch: call("broadcast")([batch, {"inside": batch}]),
    "ONE_TO_ALL on rank 0": lambda call, batch: call("on_rank_zero")(batch, key=["k"]),
    "ONE_TO_ALL in turn": lambda call, batch: call("in_turn")(batch),
    "ALL_TO_ALL": lambda call, batch: call("exchange")([batch, 1, None, "d"], other=batch),
}


@pytest.mark.parametrize("num_rows", [8, 7, 1])
@pytest.mark.parametrize("name", CALLS)
def test_blocking_and_remote_calls_return_the_same_on_both_backends(both, name, num_rows):
    batch = rich_batch(num_rows)

    def program(groups):
        blocking = CALLS[name](lambda method: getattr(groups.model, method), batch)
        later = CALLS[name](lambda method: getattr(groups.model, method).remote, batch)
        assert isinstance(later, DataProtoFuture)
        later = later.get()
        assert canonical(blocking) == canonical(later)
        return blocking, groups.model.forget()

    same_on_both(both, program)
    assert canonical(batch) == canonical(rich_batch(num_rows))


def test_dispatch_modes_return_the_documented_numbers(both):
    model, batch = both.ray.model, batch_of(1, 2, 3, 4, 5)
    assert model.double(batch, plus=1).batch["doubled"].tolist() == [3, 5, 7, 9, 11]
    assert model.on_grid(batch).batch["x"].tolist() == [10, 20, 30, 42, 52]
    assert model.on_pipeline(batch).batch["y"].tolist() == [11, 21, 31, 43, 53]
    assert model.on_both_axes(batch).batch["x"].tolist() == [10, 20, 32, 41, 53]
    assert model.from_last_part(batch).batch["x"].tolist() == [13, 23, 32, 42, 51]
    assert model.update(batch).meta_info == {"metrics": {"loss": [3.0, 3.0, 4.0, 5.0], "rank": [0, 1, 2, 3]}}
    responses = model.respond(batch).batch["responses"]
    assert responses.tolist() == [[1, 0, 0, 0], [2, 0, 0, 0], [3, 3, 0, 0], [4, 4, 4, 0], [5, 5, 5, 5]]
    assert both.ray.twin.double(batch).batch["doubled"].tolist() == [7, 14, 21, 28, 35]
    assert both.ray.pair.double(batch).batch["doubled"].tolist() == [5, 10, 15, 20, 25]


def test_a_non_blocking_method_returns_a_future_on_both_backends(both):
    result = same_on_both(both, lambda groups: groups.model.double_later(batch_of(1, 2, 3)).get())
    assert result.batch["doubled"].tolist() == [2, 4, 6]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(10**40),
        float("nan"),
        "text",
        b"bytes",
        {"a": [1, (2, {3})], 4: {"b": None}},
        OrderedDict(b=1, a=torch.ones(2)),
        np.float64(0.1),
        np.int8(-1),
        np.array(5.0),
        np.array({"an": "object"}, dtype=object),
        np.array(["b", "abc"]),
        np.array([b"b"]),
        np.zeros((2, 0), dtype=np.complex64),
        torch.tensor(3, dtype=torch.int8),
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(2, requires_grad=True) * 2,
        torch.float16,
        torch.Size([1, 2]),
        slice(1, None),
        [DataProto(meta_info={"alone": 1}), {"deep": (DataProto.from_dict({"x": torch.arange(2)}), None)}],
    ],
    ids=lambda value: re.sub(r"\s+", " ", repr(value))[:40],
)
def test_a_value_arrives_and_returns_the_same_on_both_backends(both, value):
    def program(groups):
        return groups.pair.broadcast(value), groups.pair.rank_zero(key=value, value=[value]), groups.pair.forget()

    same_on_both(both, program)


def test_a_masked_array_keeps_its_mask_on_both_backends(both):
    masked = np.ma.array([1, 2, 3], mask=[False, True, False])
    result = same_on_both(both, lambda groups: [value for _, value, _ in groups.pair.broadcast(masked)])
    assert result[0].sum() == 4


def test_a_conjugated_column_is_sent_on_both_backends(both):
    batch = DataProto.from_dict({"waves": torch.tensor([1 + 2j, 3 - 1j]).conj()})
    same_on_both(both, lambda groups: groups.pair.echo(batch))


def test_rows_of_an_expanded_column_are_sent_on_both_backends(both):
    batch = DataProto.from_dict({"temperatures": torch.tensor(0.5).expand(2)})
    same_on_both(both, lambda groups: groups.pair.echo(batch))


def test_tensors_inside_objects_and_meta_info_arrive_detached_on_both_backends(both):
    weights = torch.ones(2, requires_grad=True)
    batch = DataProto.from_dict(non_tensors={"infos": [weights, {"weights": weights}]}, meta_info={"weights": weights})
    same_on_both(both, lambda groups: (groups.pair.broadcast(batch), groups.pair.forget()))


def test_records_with_padding_bytes_keep_their_type_on_both_backends(both):
    aligned = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    records = np.array([(1, 0.5), (2, 1.5), (3, 2.5)], aligned)

    result = same_on_both(both, lambda groups: _echo_declared(groups, records))
    assert result.non_tensor_batch["records"].dtype == aligned


def _echo_declared(groups: Groups, records: np.ndarray) -> DataProto:
    parts = [DataProto.from_dict(non_tensors={"records": part}) for part in (records[:2], records[2:])]
    handles = [groups.backend.put(part) for part in parts]
    future = DataProtoFuture(DataProto.concat, handles, num_rows=3, columns=("records",), part_rows=[2, 1])
    return future.get()


# Errors


@pytest.mark.parametrize(
    "attempt",
    [
        lambda groups: groups.model.double(DataProto.from_dict({"y": torch.zeros(2)})),
        lambda groups: groups.model.echo(batch_of()),
        lambda groups: groups.model.add(batch_of(1, 2), batch_of(1)),
        lambda groups: groups.model.wrong_columns(batch_of(1, 2)),
        lambda groups: groups.model.wrong_columns.remote(batch_of(1, 2)).get(),
        lambda groups: groups.model.add(batch_of(1, 2), batch_of(1, 2)),
        lambda groups: groups.model.fail_on_rank_one(batch_of(1, 2)),
        lambda groups: groups.model.fail_on_rank_one.remote(batch_of(1, 2)).get(),
        lambda groups: groups.model.each(batch_of(1, 2), [1, 2, 3]),
        lambda groups: groups.model.rank_zero(0, wrong=1),
        lambda groups: groups.model.double.remote(batch_of(1, 2)).get("x"),
        lambda groups: groups.model.double(groups.model.double.remote(batch_of(1, 2))),
        lambda groups: groups.model.read_future(groups.model.forward.remote(batch_of(1, 2))),
        lambda groups: groups.model.double(batch_of(1, 2), torch.zeros(2)),
    ],
)
def test_errors_have_the_same_type_and_text_on_both_backends(both, attempt):
    errors = []
    for groups in (both.local, both.ray):
        with pytest.raises(HybridFlowError) as caught:
            attempt(groups)
        errors.append((type(caught.value), str(caught.value), getattr(caught.value, "rank", None)))
    assert errors[0] == errors[1]


def test_error_note_names_the_worker_of_an_undeclared_column(both):
    for groups in (both.local, both.ray):
        with pytest.raises(FieldError) as caught:
            groups.model.wrong_columns(batch_of(1, 2))
        assert getattr(caught.value, "__notes__", []) == ["in Model.wrong_columns, worker model/0"]


def test_groups_keep_working_after_errors(both):
    result = same_on_both(both, lambda groups: groups.model.double(batch_of(1)))
    assert result.batch["doubled"].tolist() == [2]


# Futures


@pytest.mark.parametrize("num_rows", [8, 5, 1])
def test_a_future_is_passed_to_groups_of_equal_and_other_size(both, num_rows):
    batch = batch_of(*range(1, num_rows + 1))

    def program(groups):
        doubled = groups.model.double.remote(batch).rename("doubled", "x")
        in_turn = groups.pair.double.remote(doubled).rename("doubled", "x")
        back = groups.twin.double.remote(in_turn)
        results = groups.twin.double(doubled), groups.pair.double(doubled), groups.pair.broadcast(doubled), back.get()
        return *results, groups.pair.forget(), groups.twin.forget(), groups.model.forget()

    results = same_on_both(both, program)
    assert results[3].batch["doubled"].tolist() == [70 * value for value in range(1, num_rows + 1)]


@pytest.mark.parametrize("num_rows", [6, 5])
def test_futures_of_two_groups_are_united_with_a_controller_batch(both, num_rows):
    batch = batch_of(*range(1, num_rows + 1))
    extra = DataProto.from_dict(
        {"row_ids": torch.arange(num_rows), "old_log_probs": torch.full((num_rows, 5), 0.5)},
        {"names": [f"controller {row}" for row in range(num_rows)]},
        {"pad_token_id": 9, "step": 1},
    )

    def program(groups):
        responses = groups.model.respond.remote(batch).rename("names", "texts")
        described = groups.pair.describe.remote(batch)
        joined = responses.union(described).union(extra)
        order = list(range(num_rows))[::-1]
        repeated = joined.reorder(order).repeat(2)
        return (
            joined.get(),
            joined.get(["texts", "x"]),
            groups.twin.echo(joined),
            groups.pair.echo(repeated.slice(1, num_rows)),
            groups.twin.each(joined.select_columns(["x", "responses", "row_ids", "names"])),
            groups.model.echo(DataProtoFuture.concat([joined.slice(0, 2), joined.slice(3, 5)])),
            groups.pair.broadcast(joined.select(["x"], ["texts"])),
            groups.twin.forget(),
            groups.pair.forget(),
            groups.model.forget(),
        )

    results = same_on_both(both, program)
    assert results[1].batch["x"].tolist() == list(range(1, num_rows + 1))
    assert results[0].batch["responses"].shape == (num_rows, 5)


def test_padded_copies_of_a_split_future_have_row_id_minus_one(both):
    numbered = DataProto.from_dict({"row_ids": torch.tensor([7, 8, 9])})  # fewer rows than the four ranks

    def program(groups):
        future = groups.pair.double.remote(batch_of(1, 2, 3)).union(numbered)
        groups.model.echo(future)
        return groups.model.forget(), groups.pair.forget()

    received, _ = same_on_both(both, program)
    assert [calls[0][0].batch["row_ids"].tolist() for calls in received] == [[7], [8], [9], [-1]]
    padded, _ = pad_dataproto_to_divisor(numbered, 4)
    assert padded.batch["row_ids"].tolist() == [7, 8, 9, -1]


def test_a_single_column_of_a_future_can_be_read(both):
    def program(groups):
        future = groups.model.describe.remote(batch_of(1, 2, 3, 4, 5))
        return future.get("x"), future.get(["x", "infos"]), future.slice(1, 4).get("ranks")

    results = same_on_both(both, program)
    assert results[2].batch["ranks"].tolist() == [0, 1, 2]


def test_concatenated_selections_of_futures_are_arguments(both):
    def program(groups):
        parts = [groups.model.describe.remote(batch_of(*values)) for values in ((1, 2, 3), (4, 5))]
        future = DataProtoFuture.concat([part.select_columns(["x", "ranks"]) for part in parts])
        return groups.pair.double(future)

    assert same_on_both(both, program).batch["doubled"].tolist() == [5, 10, 15, 20, 25]


@pytest.mark.parametrize("name", ["local", "ray"])
def test_a_worker_gets_the_same_meta_info_from_a_future_and_a_batch(both, name):
    groups = getattr(both, name)
    extra = DataProto.from_dict({"row_ids": torch.arange(2)}, meta_info={"temperature": 0.5})
    future = groups.pair.describe.remote(batch_of(1, 2)).union(extra)
    received = []
    for argument in (future.get(), future):
        groups.model.forget()
        groups.model.double(argument)
        received.append(groups.model.forget()[0][0].meta_info)
    assert received[0] == {"made_by": "describe", "temperature": 0.5}
    assert received[1] == received[0]


def test_reading_an_object_column_is_the_same_on_both_backends(both):
    same_on_both(both, lambda groups: groups.model.describe.remote(batch_of(1, 2, 3)).get("infos"))


def test_a_worker_can_receive_an_unread_future(both):
    def program(groups):
        future = groups.model.double.remote(batch_of(1, 2, 3, 4, 5))
        wide = future.union(groups.pair.thrice.remote(batch_of(1, 2, 3, 4, 5)).slice(0, 5))
        results = groups.twin.read_future(future), groups.pair.read_future(wide), groups.twin.read_whole_future(wide)
        return *results, future.get(), groups.model.forget()

    results = same_on_both(both, program)
    assert results[0].batch["doubled"].tolist() == [2, 4, 7, 10, 13]
    assert results[3].batch["doubled"].tolist() == [2, 4, 6, 8, 10]


def test_a_worker_can_read_the_length_of_a_future_on_both_backends(both):
    def program(groups):
        return groups.pair.length_of_future(groups.model.double.remote(batch_of(1, 2, 3, 4)))

    assert same_on_both(both, program) == [2, 2]


def test_an_undeclared_future_cannot_be_sent_unread(both):
    batch = batch_of(1, 2, 3, 4, 5)
    batch.auto_padding = True  # a part then has a row and a copy, so that shards are not sent whole
    with pytest.raises(DispatchError, match=r"does not declare the columns it writes; declare writes=\(\.\.\.\)"):
        both.ray.pair.read_whole_future(both.ray.model.echo.remote(batch))


def test_a_worker_can_receive_unread_concatenated_handles(both):
    def program(groups):
        handles = groups.pair.execute_all("echo", [batch_of(1, 2), batch_of(3)])
        return groups.pair.read_whole_future(DataProtoFuture.concat(handles))

    same_on_both(both, program)


def test_concatenated_handles_are_an_argument_of_the_next_call(both):
    def program(groups):
        handles = groups.pair.execute_all("echo", [batch_of(1, 2), batch_of(3)])
        result = groups.model.broadcast(DataProtoFuture.concat(handles))
        return result, groups.model.forget(), groups.pair.forget()

    assert same_on_both(both, program)[0][3][1].batch["x"].tolist() == [1, 2, 3]


def test_a_future_inside_a_dict_arrives_the_same_on_both_backends(both):
    def program(groups):
        future = groups.pair.double.remote(batch_of(1, 2))
        groups.pair.forget()
        groups.pair.broadcast({"future": future})
        return [type(calls[0]["future"]).__name__ for calls in groups.pair.forget()]

    same_on_both(both, program)


def test_passing_on_a_future_raises_the_error_of_a_failed_replica(both):
    for groups in (both.local, both.ray):
        with pytest.raises(HybridFlowError, match="rank 1 is unlucky"):
            groups.pair.echo(groups.model.fail_on_rank_one.remote(batch_of(1, 2)))


def test_an_object_future_is_split_for_a_method_that_reads_no_column(both):
    def program(groups):
        part = groups.backend.put(DataProto.from_dict(non_tensors={"texts": ["a", "b", "c"]}, meta_info={"step": 1}))
        future = DataProtoFuture(DataProto.concat, [part], num_rows=3, columns=("texts",), part_rows=[3])
        return groups.pair.count(future), groups.pair.forget()

    same_on_both(both, program)


# In-place writes are private


@pytest.fixture(params=["local", "ray"])
def groups(both, request) -> Groups:
    return getattr(both, request.param)


def test_writes_of_ranks_into_arguments_are_private(groups):
    batch = DataProto.from_dict({"x": torch.tensor([1, 2])}, {"infos": [{"numbers": [1]}, {"numbers": [2]}]})
    value = {"array": np.arange(3), "tensor": torch.ones(2), "list": [1]}
    for group in (groups.model, groups.twin, groups.pair):
        for written, other in group.scribble(batch, value):
            assert written.batch["x"].tolist() == [0, 0]
            assert [entry["numbers"] for entry in written.non_tensor_batch["infos"]] == [
                [1, "scribbled"],
                [2, "scribbled"],
            ]
            assert other["array"].tolist() == [0, 0, 0]
            assert other["list"] == []
    assert batch.batch["x"].tolist() == [1, 2]
    assert batch.non_tensor_batch["infos"].tolist() == [{"numbers": [1]}, {"numbers": [2]}]
    assert batch.meta_info == {}
    assert value["array"].tolist() == [0, 1, 2]
    assert value["tensor"].tolist() == [1.0, 1.0]
    assert value["list"] == [1]


def test_writes_of_ranks_into_future_arguments_are_private(groups):
    future = groups.model.describe.remote(batch_of(1, 2, 3))
    for part in (future, future.select_columns(["x", "infos"]), future.slice(0, 1)):
        for written, _ in groups.pair.scribble(part):
            assert written.batch["x"].sum() == 0
        for written, _ in groups.twin.scribble(part):
            assert written.batch["x"].sum() == 0
    assert future.get().batch["x"].tolist() == [1, 2, 3]
    assert [entry["numbers"] for entry in future.get().non_tensor_batch["infos"]] == [[0], [1], [2]]


def test_writes_of_callers_into_result_tensors_are_private(groups):
    future = groups.model.describe.remote(batch_of(1, 2, 3, 4, 5))
    for part in (future, future.slice(0, 2), future.slice(1, 2), future.slice(2, 5)):
        got = part.get()
        got.batch["x"].zero_()
        got.meta_info["made_by"] = "the caller"
    assert future.get().batch["x"].tolist() == [1, 2, 3, 4, 5]
    assert future.get().meta_info == {"made_by": "describe"}
    assert groups.pair.echo(future).batch["x"].tolist() == [1, 2, 3, 4, 5]


def test_writes_of_callers_into_result_objects_are_private(groups):
    future = groups.model.describe.remote(batch_of(1, 2, 3))
    future.get().non_tensor_batch["infos"][1]["numbers"].append("written")
    assert future.get().non_tensor_batch["infos"][1] == {"name": "name 2", "numbers": [1]}


def test_writes_of_callers_into_blocking_results_are_private(groups):
    batch = rich_batch(4)
    groups.model.forget()
    result = groups.model.echo(batch)
    result.batch["x"].zero_()
    result.non_tensor_batch["infos"][0]["numbers"].append("written")
    result.meta_info["array"][:] = 9
    for (received, _, _), *_ in groups.model.forget():
        assert received.batch["x"].item() > 0
        assert "written" not in received.non_tensor_batch["infos"][0]["numbers"]
        assert received.meta_info["array"].tolist() == [0, 1, 2]
    assert canonical(batch) == canonical(rich_batch(4))


# Colocated roles


def test_colocated_roles_with_equal_method_names_are_separate(both):
    def program(groups):
        groups.model.double(batch_of(1, 2, 3, 4))
        groups.twin.double(batch_of(5, 6, 7, 8))
        later = groups.model.double.remote(batch_of(1, 2)), groups.twin.double.remote(batch_of(1, 2))
        results = [future.get() for future in later]
        return *results, groups.model.forget(), groups.twin.forget()

    first, second, of_model, of_twin = same_on_both(both, program)
    assert (first.batch["doubled"].tolist(), second.batch["doubled"].tolist()) == ([2, 4], [7, 14])
    assert [calls[0].batch["x"].tolist() for calls in of_model] == [[1], [2], [3], [4]]
    assert [calls[0].batch["x"].tolist() for calls in of_twin] == [[5], [6], [7], [8]]


# The object store


def store_mib() -> float:
    """Return the memory in use in the object store of this machine, in MiB."""
    import ray
    from ray._private.internal_api import memory_summary

    address = ray.get_runtime_context().gcs_address
    found = re.search(r"Plasma memory usage ([\d.]+) MiB", memory_summary(address, stats_only=True))
    return float(found[1]) if found else 0.0


def wait_for_store(limit_mib: float) -> float:
    """Return the memory in use as soon as it is at most `limit_mib`, or after 100 s, in MiB."""
    deadline = time.monotonic() + 100
    while (used := store_mib()) > limit_mib and time.monotonic() < deadline:
        time.sleep(0.1)
    return used


def test_results_are_released_with_their_last_future(both):
    before, model, pair = store_mib(), both.ray.model, both.ray.pair
    future = model.enlarge.remote(batch_of(*range(8)))
    got = future.get("large")
    derived = future.slice(0, 4).rename("large", "x").union(DataProto.from_dict({"row_ids": torch.arange(4)}))
    pair.count(derived)
    assert store_mib() - before > 7
    del future
    assert store_mib() - before > 3
    read = derived.get()
    del derived
    assert wait_for_store(before + 0.5) <= before + 0.5
    assert (got.batch["large"].sum().item(), read.batch["x"].sum().item()) == (8 * 256 * 1024, 4 * 256 * 1024)


def test_blocking_calls_and_errors_release_the_object_store(both):
    before, model = store_mib(), both.ray.model
    large = DataProto.from_dict({"x": torch.ones(8, 256, 1024)})
    for _ in range(2):
        model.enlarge(large)
        model.silent(large)
        with pytest.raises(HybridFlowError):
            model.wrong_columns(large)
        with pytest.raises(HybridFlowError):
            model.add(large, large)
    assert wait_for_store(before + 0.5) <= before + 0.5


def memory_while_held(model: WorkerGroup, value: Any, directory: Path) -> float:
    """Return the additional store memory while every rank holds the value, in MiB."""
    before = store_mib()
    future = model.hold.remote(value, str(directory))
    while len(list(directory.iterdir())) < 4:
        time.sleep(0.01)
    held = store_mib() - before
    (directory / "release").touch()
    future.get()
    return held


def test_a_batch_sent_to_several_ranks_is_put_once(both, tmp_path):
    large = DataProto.from_dict({"x": torch.ones(4, 256, 1024)})
    assert 3.5 < memory_while_held(both.ray.model, large, tmp_path) < 7


def test_an_array_sent_to_several_ranks_is_put_once(both, tmp_path):
    assert 3.5 < memory_while_held(both.ray.model, np.ones((4, 256, 1024), np.float32), tmp_path) < 7
