"""Equivalence of Ray and local backend: the same calls return results that are equal byte for byte.

Four ranks hold two roles of the same class, `model` and `twin`; two other ranks are `pair`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.model_worker import Model
from fixtures.values import canonical, rich_batch
from hybridflow.controller import ClassWithInitArgs, LocalBackend, ResourcePool, WorkerGroup, spawn_colocated
from hybridflow.errors import DispatchError, FieldError, HybridFlowError
from hybridflow.protocol import DataProto, DataProtoFuture

pytestmark = pytest.mark.ray

MESHES = {
    "default": {"data": 2, "tensor": 2},
    "grid": {"data": 2, "tensor": 2, "pipeline": 1},
    "pipelined": {"data": 2, "pipeline": 2},
}


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


def same_on_both(both: Both, program: Callable[[Groups], Any]) -> Any:
    """Check that the program returns the same on Ray and locally, and return it; received values are cleared first."""
    for group in (both.local.model, both.local.twin, both.local.pair, both.ray.model, both.ray.twin, both.ray.pair):
        group.forget()
    here, there = program(both.local), program(both.ray)
    assert canonical(here) == canonical(there)
    return there


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
    "DP_COMPUTE_PROTO with two rows for one": lambda call, batch: call("twice")(batch),
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


@pytest.mark.parametrize("num_rows", [7, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (8, 1))])
def test_every_mode_returns_the_same_on_both_backends(both, num_rows):
    batch = rich_batch(num_rows)
    for call in CALLS.values():

        def program(groups, call=call):
            blocking = call(lambda method: getattr(groups.model, method), batch)
            later = call(lambda method: getattr(groups.model, method).remote, batch)
            assert isinstance(later, DataProtoFuture)
            assert canonical(blocking) == canonical(later.get())
            return blocking, groups.model.forget()

        same_on_both(both, program)
        assert canonical(batch) == canonical(rich_batch(num_rows))


def test_results_are_collected_in_the_order_of_the_mode(both):
    model, batch = both.ray.model, batch_of(1, 2, 3, 4, 5)
    assert model.on_both_axes(batch).batch["x"].tolist() == [10, 20, 32, 41, 53]
    assert model.from_last_part(batch).batch["x"].tolist() == [13, 23, 32, 42, 51]


ATTEMPTS = [
    lambda groups: groups.model.double(DataProto.from_dict({"y": torch.zeros(2)})),
    lambda groups: groups.model.echo(batch_of()),
    lambda groups: groups.model.add(batch_of(1, 2), batch_of(1)),
    lambda groups: groups.model.wrong_columns(batch_of(1, 2)),
    lambda groups: groups.model.wrong_columns.remote(batch_of(1, 2)).get(),
    lambda groups: groups.model.add(batch_of(1, 2), batch_of(1, 2)),
    lambda groups: groups.model.fail_in_a_replica(batch_of(1, 2)),
    lambda groups: groups.model.fail_in_a_replica.remote(batch_of(1, 2)).get(),
    lambda groups: groups.model.each(batch_of(1, 2), [1, 2, 3]),
    lambda groups: groups.model.rank_zero(0, wrong=1),
    lambda groups: groups.model.double.remote(batch_of(1, 2)).get("x"),
    lambda groups: groups.model.double(groups.model.double.remote(batch_of(1, 2))),
    lambda groups: groups.model.read_future(groups.model.forward.remote(batch_of(1, 2))),
    lambda groups: groups.model.double(batch_of(1, 2), torch.zeros(2)),
]


def test_errors_have_the_same_type_and_text_on_both_backends(both):
    for attempt in ATTEMPTS:
        errors = []
        for groups in (both.local, both.ray):
            with pytest.raises(HybridFlowError) as caught:
                attempt(groups)
            errors.append((type(caught.value), str(caught.value), getattr(caught.value, "rank", None)))
        assert errors[0] == errors[1]
    for groups in (both.local, both.ray):
        with pytest.raises(FieldError) as caught:
            groups.model.wrong_columns(batch_of(1, 2))
        assert getattr(caught.value, "__notes__", []) == ["in Model.wrong_columns, worker model/0"]
        with pytest.raises(HybridFlowError, match="rank 1 is unlucky"):
            groups.pair.echo(groups.model.fail_in_a_replica.remote(batch_of(1, 2)))
    batch = batch_of(1, 2, 3, 4, 5)
    batch.auto_padding = True  # a part then has a row and a copy, so that shards are not sent whole
    with pytest.raises(DispatchError, match=r"does not declare the columns it writes; declare writes=\(\.\.\.\)"):
        both.ray.pair.read_whole_future(both.ray.model.echo.remote(batch))
    assert both.ray.model.double(batch_of(1)).batch["doubled"].tolist() == [2]


# Futures


@pytest.mark.parametrize("num_rows", [5, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (8, 1))])
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


@pytest.mark.parametrize("num_rows", [5, pytest.param(6, marks=pytest.mark.exhaustive)])
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
        order = np.arange(num_rows)[::-1]
        repeated = joined.select_rows(np.repeat(order, 2))
        return (
            joined.get(),
            joined.get(["texts", "x"]),
            groups.twin.echo(joined),
            groups.pair.echo(repeated.slice(1, num_rows)),
            groups.twin.each(joined.select_columns(["x", "responses", "row_ids", "names"])),
            groups.model.echo(DataProtoFuture.concat([joined.slice(0, 2), joined.slice(3, 5)])),
            groups.pair.broadcast(joined.select_columns(["x", "texts"])),
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


def columns(groups):
    future = groups.model.describe.remote(batch_of(1, 2, 3, 4, 5))
    return future.get("x"), future.get("infos"), future.get(["x", "infos"]), future.slice(1, 4).get("ranks")


def concatenated_selections(groups):
    parts = [groups.model.describe.remote(batch_of(*values)) for values in ((1, 2, 3), (4, 5))]
    return groups.pair.double(DataProtoFuture.concat([part.select_columns(["x", "ranks"]) for part in parts]))


def unread(groups):
    future = groups.model.double.remote(batch_of(1, 2, 3, 4, 5))
    wide = future.union(groups.pair.twice.remote(batch_of(1, 2, 3, 4, 5)).slice(0, 5))
    results = groups.twin.read_future(future), groups.pair.read_future(wide), groups.twin.read_whole_future(wide)
    return *results, future.get(), groups.model.forget(), groups.pair.length_of_future(future.slice(0, 4))


def concatenated_handles(groups):
    handles = groups.pair.execute_all("echo", [batch_of(1, 2), batch_of(3)])
    future = DataProtoFuture.concat(handles)
    return groups.pair.read_whole_future(future), groups.model.broadcast(future), groups.model.forget()


def inside_a_dict(groups):
    groups.pair.broadcast({"future": groups.pair.double.remote(batch_of(1, 2))})
    return [type(calls[-1]["future"]).__name__ for calls in groups.pair.forget()]


def without_columns(groups):
    part = groups.backend.put(DataProto.from_dict(non_tensors={"texts": ["a", "b", "c"]}, meta_info={"step": 1}))
    future = DataProtoFuture(DataProto.concat, [part], num_rows=3, columns=("texts",), part_rows=[3])
    return groups.pair.count(future), groups.pair.forget()


def with_meta_info(groups):
    extra = DataProto.from_dict({"row_ids": torch.arange(2)}, meta_info={"temperature": 0.5})
    future = groups.pair.describe.remote(batch_of(1, 2)).union(extra)
    for argument in (future.get(), future):
        groups.model.double(argument)
    return [batch.meta_info for batch in groups.model.forget()[0]]


def not_blocking(groups):
    return groups.model.double_later(batch_of(1, 2, 3)).get()


def test_futures_mean_the_same_on_both_backends(both):
    assert same_on_both(both, columns)[3].batch["ranks"].tolist() == [0, 1, 2]
    assert same_on_both(both, concatenated_selections).batch["doubled"].tolist() == [5, 10, 15, 20, 25]
    results = same_on_both(both, unread)
    assert results[0].batch["doubled"].tolist() == [2, 4, 7, 10, 13]
    assert results[3].batch["doubled"].tolist() == [2, 4, 6, 8, 10]
    assert results[5] == [2, 2]
    assert same_on_both(both, concatenated_handles)[1][3][1].batch["x"].tolist() == [1, 2, 3]
    assert len(same_on_both(both, inside_a_dict)) == 2
    same_on_both(both, without_columns)
    assert same_on_both(both, with_meta_info) == [{"made_by": "describe", "temperature": 0.5}] * 2
    assert same_on_both(both, not_blocking).batch["doubled"].tolist() == [2, 4, 6]


# In-place writes are private


@pytest.mark.parametrize("name", ["local", "ray"])
def test_writes_of_ranks_into_arguments_are_private(both, name):
    groups = getattr(both, name)
    batch = DataProto.from_dict({"x": torch.tensor([1, 2])}, {"infos": [{"numbers": [1]}, {"numbers": [2]}]})
    value = {"array": np.arange(3), "tensor": torch.ones(2), "list": [1]}
    before = canonical((batch, value))
    for group in (groups.model, groups.twin, groups.pair):
        for written, other in group.scribble(batch, value):
            assert written.batch["x"].tolist() == [0, 0]
            infos = [entry["numbers"] for entry in written.non_tensor_batch["infos"]]
            assert infos == [[1, "scribbled"], [2, "scribbled"]]
            assert (other["array"].tolist(), other["list"]) == ([0, 0, 0], [])
    assert canonical((batch, value)) == before
    future = groups.model.describe.remote(batch_of(1, 2, 3))
    for part in (future, future.select_columns(["x", "infos"]), future.slice(0, 1)):
        for written, _ in [*groups.pair.scribble(part), *groups.twin.scribble(part)]:
            assert written.batch["x"].sum() == 0
    assert future.get().batch["x"].tolist() == [1, 2, 3]
    assert [entry["numbers"] for entry in future.get().non_tensor_batch["infos"]] == [[0], [1], [2]]


@pytest.mark.parametrize("name", ["local", "ray"])
def test_writes_of_callers_into_results_are_private(both, name):
    groups = getattr(both, name)
    future = groups.model.describe.remote(batch_of(1, 2, 3, 4, 5))
    for part in (future, future.slice(0, 2), future.slice(1, 2), future.slice(2, 5)):
        got = part.get()
        got.batch["x"].zero_()
        got.meta_info["made_by"] = "the caller"
        got.non_tensor_batch["infos"][0]["numbers"].append("written")
    assert future.get().batch["x"].tolist() == [1, 2, 3, 4, 5]
    assert future.get().meta_info == {"made_by": "describe"}
    assert [len(info["numbers"]) for info in future.get().non_tensor_batch["infos"]] == [1] * 5


# The object store


def store_mib() -> float:
    """Return the memory in use in the object store of this machine, in MiB."""
    import ray
    from ray._private.internal_api import memory_summary

    address = ray.get_runtime_context().gcs_address
    found = re.search(r"Plasma memory usage ([\d.]+) MiB", memory_summary(address, stats_only=True))
    return float(found[1]) if found else 0.0


def test_results_are_released_with_their_last_future(both, wait_until):
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
    wait_until(lambda: store_mib() <= before + 0.5)
    assert (got.batch["large"].sum().item(), read.batch["x"].sum().item()) == (8 * 256 * 1024, 4 * 256 * 1024)


def test_blocking_calls_and_errors_release_the_object_store(both, wait_until):
    before, model = store_mib(), both.ray.model
    large = DataProto.from_dict({"x": torch.ones(8, 256, 1024)})
    for _ in range(2):
        model.enlarge(large)
        model.silent(large)
        with pytest.raises(HybridFlowError):
            model.wrong_columns(large)
        with pytest.raises(HybridFlowError):
            model.add(large, large)
    wait_until(lambda: store_mib() <= before + 0.5)
