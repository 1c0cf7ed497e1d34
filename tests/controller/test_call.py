"""Complete calls on a group of ranks in this process: what each rank receives, and what the caller gets."""

import math
import os
import traceback
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from fixtures.model_worker import Model
from fixtures.values import held_values
from hybridflow.controller import (
    DISPATCH_MODES,
    ClassWithInitArgs,
    Dispatch,
    LocalBackend,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
)
from hybridflow.errors import BatchError, DispatchError, FieldError, WorkerError
from hybridflow.protocol import DataProto, DataProtoConfig, DataProtoFuture
from hybridflow.protocol.handle import Duration


def make_group(num_ranks=2, **kwargs):
    return WorkerGroup(ResourcePool([num_ranks]), ClassWithInitArgs(Model), name="model", **kwargs)


def batch_of(*values, **columns):
    return DataProto.from_dict(tensors={"x": torch.tensor(values)}, **columns)


def received(group, column="x"):
    return [batch.batch[column].tolist() for batch, *_ in group.last_received()]


# Splitting, padding, collecting

MESHES = st.permutations(["data", "tensor", "pipeline"]).flatmap(
    lambda axes: st.tuples(*(st.tuples(st.just(axis), st.integers(1, 3)) for axis in axes)).map(dict)
)


def equal_parts(rows, num_parts):
    """Return the parts of a list, whose lengths differ by at most one: the first ones are longer."""
    length, longer = divmod(len(rows), num_parts)
    ends = [(part + 1) * length + min(part + 1, longer) for part in range(num_parts)]
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(axes=MESHES, num_rows=st.integers(1, 20), auto_padding=st.booleans(), later=st.booleans())
def test_a_batch_is_split_over_a_mesh_and_collected_in_order(axes, num_rows, auto_padding, later):
    num_ranks, num_parts = math.prod(axes.values()), axes["data"]
    group = make_group(num_ranks, meshes={"grid": axes})
    batch = batch_of(*range(num_rows), non_tensors={"names": [str(n) for n in range(num_rows)]}, meta_info={"step": 1})
    batch.auto_padding = auto_padding
    padded = [*range(num_rows)]
    if auto_padding or num_rows < num_parts:  # copies of the first rows, as often as needed
        padded += [n % num_rows for n in range(-num_rows % num_parts)]
    parts, strides, index = equal_parts(padded, num_parts), {}, 1
    for axis in reversed(axes):
        strides[axis], index = index, index * axes[axis]
    part_of = [rank // strides["data"] % num_parts for rank in range(num_ranks)]
    first = strides["pipeline"] * (axes["pipeline"] - 1)  # the last stage of a pipeline is collected
    collected = [first + part * strides["data"] for part in range(num_parts)]

    result = group.on_grid.remote(batch) if later else group.on_grid(batch)
    result = result.get() if later else result
    assert [part.batch["x"].tolist() for part in group.last_received()] == [parts[part] for part in part_of]
    assert [list(part.non_tensor_batch["names"]) for part in group.last_received()] == [
        [str(n) for n in parts[part]] for part in part_of
    ]
    tagged = [10 * n + collected[part] for part in range(num_parts) for n in parts[part]]
    assert result.batch["x"].tolist() == tagged[:num_rows]
    result.batch["x"].fill_(9)
    assert batch.batch["x"].tolist() == list(range(num_rows))
    workers: list[Any] = group.workers
    memory = {worker.instance.received[0].batch["x"].data_ptr() for worker in workers}
    assert len(memory) == num_ranks  # ranks of a replica do not share memory


@settings(deadline=None, derandomize=True, max_examples=40)
@given(num_ranks=st.integers(1, 5), num_rows=st.integers(1, 9), auto_padding=st.booleans(), later=st.booleans())
def test_results_have_the_rows_of_the_caller_without_copies(num_ranks, num_rows, auto_padding, later):
    group, batch = make_group(num_ranks), batch_of(*range(num_rows), auto_padding=auto_padding)

    def call(method, *arguments):
        return method.remote(*arguments).get() if later else method(*arguments)

    assert call(group.double, batch).batch["doubled"].tolist() == [2 * n for n in range(num_rows)]
    assert call(group.twice, batch).batch["x"].tolist() == [n for n in range(num_rows) for _ in "ab"]
    assert len(group.twice.remote(batch)) == 2 * num_rows
    assert call(group.add, batch, batch.rename("x", "y")).batch["sum"].tolist() == [2 * n for n in range(num_rows)]
    listed = [part.batch["x"].tolist() for part, *_ in call(group.each, batch) if len(part)]
    assert [*chain.from_iterable(listed)] == list(range(num_rows))
    if not auto_padding:
        assert sum(call(group.metric, batch, 0.5)) == sum(range(num_rows)) / 2
        assert sum(call(group.update, batch).meta_info["metrics"]["loss"]) == sum(range(num_rows))
    assert call(group.silent, batch) is None
    numbered = DataProto.from_dict({"row_ids": torch.arange(num_rows)}, auto_padding=True)
    group.echo(numbered)
    row_ids = [*chain.from_iterable(received(group, "row_ids"))]
    assert row_ids == [*range(num_rows), *[-1] * (-num_rows % num_ranks)]


ERRORS = [
    (
        lambda g: g.add(batch_of(1, 2, 3), batch_of(1, 2)),
        DispatchError,
        r"Model\.add was called with batches of 3 and 2",
    ),
    (lambda g: g.echo(batch_of()), DispatchError, r"Model\.echo was called with a batch of 0 rows"),
    (lambda g: g.echo(DataProto(meta_info={"step": 1})), DispatchError, "0 rows"),
    (lambda g: g.echo({"x": 1}), DispatchError, r"Model\.echo: this mode splits a DataProto.*the arguments are dict"),
    (lambda g: g.total(batch_of(1, 2)), DispatchError, r"Model\.total: output 0 of 2 is float"),
    (lambda g: g.double(batch_of(1, 2).rename("x", "y")), FieldError, r"Model\.double needs 'x', but the batch has y"),
    (lambda g: g.drop_a_row(batch_of(1, 2, 3, 4)), DispatchError, r"Model\.drop_a_row on rank 0 returned 1 rows for 2"),
    (lambda g: g.on_grid(batch_of(1, 2)), DispatchError, "no mesh 'grid'"),
    (
        lambda g: g.read_future(g.twice.remote(batch_of(1, 2))),
        FieldError,
        r"Model\.read_future needs 'doubled', but the batch has x",
    ),
    (
        lambda g: g.fail_on_rank_one.remote(batch_of(1, 2)),
        WorkerError,
        r"Model\.fail_on_rank_one failed on worker model/1: ValueError",
    ),
]


@pytest.mark.parametrize(("attempt", "kind", "says"), ERRORS, ids=range(len(ERRORS)))
def test_errors_of_calls_name_the_method(attempt, kind, says):
    with pytest.raises(kind, match=says):
        attempt(make_group(2))


def test_a_call_with_a_missing_column_or_other_columns_is_explained():
    group = make_group(2)
    with pytest.raises(FieldError, match="needs 'x'"):
        group.double(batch_of(1, 2).rename("x", "y"))
    assert group.forget() == [[], []]  # raised before anything is sent
    with pytest.raises(FieldError) as caught:
        group.other_columns_on_rank_one(batch_of(1, 2))
    assert caught.value.__notes__ == ["while collecting the results of Model.other_columns_on_rank_one"]


def test_calls_without_a_batch_reach_the_ranks_of_their_mode():
    group = make_group(3)
    assert group.metric() == [0.0, 0.0, 0.0]
    assert group.in_turn() == [(0, None), (1, None), (2, None)]
    assert group.broadcast([1, 2]) == [(rank, [1, 2], None) for rank in range(3)]
    assert group.apply(lambda x: x + 1, batch_of(1, 2, 3)).batch["x"].tolist() == [2, 3, 4]


SPLITTING = [name for name, mode in DISPATCH_MODES.items() if mode.part_of_rank is not None]
"""The built-in modes that split a batch; tests register others."""


def counting_group(mode):
    """Return a group of four ranks whose method counts rows, in one replica per rank, without knowing of padding."""
    takes_function = mode is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC
    is_list = mode.collect_fn is Dispatch.ALL_TO_ALL.collect_fn

    class Counter(Worker):
        @register(mode, rows="one")
        def count(self, *arguments):
            ones = float(arguments[-1].batch["x"].sum())
            return ones if is_list else DataProto(meta_info={"metrics": {"ones": ones}})

    group = WorkerGroup(ResourcePool([4]), ClassWithInitArgs(Counter))

    def count(batch, call=group.count):
        result = call(*([len] if takes_function else []), batch)
        return sum(result if is_list else result.meta_info["metrics"]["ones"])

    return group, count


@pytest.mark.parametrize("name", SPLITTING)
def test_numbers_count_every_row_once_or_are_an_error(name, monkeypatch):
    group, count = counting_group(DISPATCH_MODES[name])
    for num_rows in (1, 3, 4, 7):
        ones = batch_of(*[1] * num_rows)
        assert count(ones) == count(ones, call=lambda *a: group.count.remote(*a).get()) == num_rows
    with pytest.raises(DispatchError, match=r"for a batch with padded copies \(1\), which would count as rows; turn"):
        count(batch_of(1, 1, 1, 1, 1, 1, 1, auto_padding=True))
    rows, weights = TensorDict({"x": torch.ones(4)}, [4]), TensorDict({"x": torch.ones(4)}, [])
    first = [len] if "WITH_FUNC" in name else []
    group.count(*first, weights, batch_of(1, 1, 1, 1))
    with pytest.raises(DispatchError, match=r"a TensorDict of 4 rows|the arguments are"):
        group.count(*first, rows, batch_of(1, 1, 1, 1))
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    with pytest.raises(DispatchError, match=r"copies \(1\), .* or declare reads with 'row_ids'"):
        count(batch_of(1, 1, 1, 1, 1))
    assert [count(batch_of(*[1] * n)) for n in (2, 4, 6)] == [2, 4, 6]  # a last rank may have copies only


def test_a_method_that_reads_row_ids_may_get_copies():
    class Aware(Worker):
        @register(Dispatch.DP_COMPUTE_METRIC, reads=("x", "row_ids"))
        def count(self, batch):
            return int(batch.batch["x"][batch.batch["row_ids"] >= 0].sum())

    group = WorkerGroup(ResourcePool([4]), ClassWithInitArgs(Aware))
    columns = {"x": torch.ones(5), "row_ids": torch.arange(5)}
    assert group.count(DataProto.from_dict(columns, auto_padding=True)) == [2, 2, 1]


# Columns


def test_only_columns_in_reads_are_sent():
    group = make_group(2)
    batch = DataProto.from_dict(
        tensors={"x": torch.tensor([1, 2]), "logits": torch.zeros(2, 100)},
        non_tensors={"texts": np.array(["a", "b"], dtype=object)},
        meta_info={"temperature": 0.5},
    )
    group.double(batch)
    for part in group.last_received():
        assert list(part.batch.keys()) == ["x"]
        assert part.non_tensor_batch == {}
        assert part.meta_info == {"temperature": 0.5}


def test_a_method_that_reads_no_column_gets_its_rows_and_meta_info():
    class Counter(Worker):
        @register(Dispatch.DP_COMPUTE_METRIC, reads=())
        def count(self, batch):
            return len(batch), batch.meta_info

    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Counter))
    assert group.count(batch_of(1, 2, 3, meta_info={"step": 1})) == [(2, {"step": 1}), (1, {"step": 1})]
    texts = DataProto.from_dict(non_tensors={"texts": ["a", "b"]}, meta_info={"step": 1})
    assert [meta_info for _, meta_info in group.count(texts)] == [{"step": 1}, {"step": 1}]


# Other modes


def test_rank_zero_calls_return_a_value_instead_of_a_list():
    group = make_group(2)
    assert group.on_rank_zero([1, 2], key="k") == (0, [1, 2], "k")
    assert group.on_rank_zero.remote([1, 2]).get() == (0, [1, 2], None)
    assert group.rank_zero("v") == (0, "v", None)
    assert group.forget() == [["v"], []]


def test_dispatch_fn_must_return_one_argument_for_each_rank():
    class Own(Worker):
        @register(dispatch_mode={"dispatch_fn": lambda group, x: ([[x]], {}), "collect_fn": lambda group, out: out})
        def run(self, x):
            return x

    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Own))
    with pytest.raises(DispatchError, match=r"Own\.run: .* for argument 0; .* one element for each of the 2 ranks"):
        group.run(1)


# Futures


def test_a_future_is_an_argument_of_another_group():
    first, second = make_group(2), make_group(3)
    future = first.double.remote(batch_of(1, 2, 3, 4))
    assert second.double(future.rename("doubled", "x")).batch["doubled"].tolist() == [4, 8, 12, 16]
    assert second.broadcast(future)[2][1].batch["doubled"].tolist() == [2, 4, 6, 8]
    parts = second.each([future, future, future])
    assert [len(part) for part, *_ in parts] == [4, 4, 4]


def test_concatenated_futures_are_split_again():
    group = make_group(2)
    future = DataProtoFuture.concat([group.double.remote(batch_of(1, 2, 3)), group.double.remote(batch_of(4))])
    assert len(future) == 4
    assert group.echo(future).batch["doubled"].tolist() == [2, 4, 6, 8]


def test_a_result_with_undeclared_columns_is_passed_by_whole_shards():
    group = make_group(2)
    undeclared = group.echo.remote(batch_of(1, 2, 3, 4).rename("x", "doubled"))
    assert (undeclared.columns, undeclared.is_table) == (None, False)
    assert group.read_future(undeclared).batch["doubled"].tolist() == [1, 2, 4, 5]
    with pytest.raises(BatchError, match=r"chunk\(3\) of 2 shards needs a result whose columns"):
        make_group(3).read_future(undeclared)
    assert group.double(group.echo.remote(batch_of(1, 2, 3))).batch["doubled"].tolist() == [2, 4, 6]


def test_metrics_are_readable_from_a_future_without_declared_columns():
    class Undeclared(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO)
        def update(self, batch):
            return DataProto(meta_info={"metrics": {"loss": 1.0}})

    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Undeclared))
    assert group.update.remote(batch_of(1, 2, 3)).get().meta_info == {"metrics": {"loss": [1.0, 1.0]}}


def test_blocking_calls_release_all_values():
    backend = LocalBackend()
    group = make_group(4, backend=backend, meshes={"grid": {"data": 2, "tensor": 2, "pipeline": 1}})
    for _ in range(3):
        group.double(batch_of(1, 2, 3))
        group.on_grid(batch_of(1, 2, 3))
        group.broadcast(batch_of(1))
        group.double(group.double.remote(batch_of(1)).rename("doubled", "x"))
        with pytest.raises(WorkerError):
            group.fail_on_rank_one(batch_of(1, 2))
        with pytest.raises(DispatchError):
            group.total(batch_of(1, 2))
    assert held_values(backend) == 0


# The path of a call, as docs/architecture.md shows it


def test_a_call_has_three_frames_between_caller_and_worker():
    class Deep(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("x",))
        def compute(self, batch):
            stack = traceback.extract_stack()
            self.path = [frame.name for frame in stack if "hybridflow/controller" in frame.filename]
            return batch

    group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Deep))
    group.compute.remote(batch_of(1, 2))
    workers: list[Any] = group.workers
    assert workers[0].instance.path == ["remote", "send", "call_all"]


# Failures


def test_a_worker_may_call_another_group():
    inner = make_group(2)

    class Outer(Worker):
        @register(Dispatch.RANK_ZERO)
        def run(self, call_inner):
            before = os.environ["RANK"], os.environ["WORLD_SIZE"]
            result = call_inner()
            return before, result, (os.environ["RANK"], os.environ["WORLD_SIZE"])

    outer = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Outer))
    assert outer.run(lambda: inner.in_turn()) == (("0", "1"), [(0, None), (1, None)], ("0", "1"))


# A backend whose calls run later, as in other processes


class Deferred:
    """A handle that runs its call at the first wait for it."""

    where, produced, others = "", (), ()

    def __init__(self, backend, start):
        self.backend, self.start, self.handle, self.duration = backend, start, None, Duration()

    def finish(self):
        if self.handle is None:
            (self.handle,) = self.start()
        return self.handle

    def get(self):
        self.backend.log.append("get")
        return self.finish().get()

    def read(self, columns, rows, *, shared=False):
        return self.finish().read(columns, rows, shared=shared)

    @staticmethod
    def wait_for(handles):
        for handle in handles:
            handle.finish()

    def release(self):
        if self.handle is not None:
            self.handle.release()


class DeferredBackend(LocalBackend):
    """A backend that runs calls when they are waited for, and logs its own calls."""

    def __init__(self):
        super().__init__()
        self.log = []

    def call_all(self, workers, method_name, per_rank, terms):
        self.log += [f"call {worker.name}" for worker in workers]
        own_call = super().call_all
        return [
            Deferred(self, lambda each=each: own_call([each[0]], method_name, [each[1]], [each[2]]))
            for each in zip(workers, per_rank, terms, strict=True)
        ]

    def put(self, value):
        self.log.append("put")
        return super().put(value)

    def wait(self, handles: Any):
        self.log.append(f"wait for {len(handles)}")
        Deferred.wait_for(handles)

    def release(self, handles: Any):
        self.log.append(f"release {len(handles)}")
        super().release([handle.handle for handle in handles if handle.handle is not None])


def deferred_group(axes):
    backend = DeferredBackend()
    return backend, make_group(math.prod(axes.values()), backend=backend, meshes={"grid": axes})


def test_all_ranks_start_before_the_first_wait_unless_in_turn():
    backend, group = deferred_group({"data": 2})
    assert group.double(batch_of(1, 2, 3)).batch["doubled"].tolist() == [2, 4, 6]
    assert backend.log == ["call model/0", "call model/1", "wait for 2", "release 2"]
    assert held_values(backend) == 0
    backend.log.clear()
    group.in_turn()
    assert backend.log[:4] == ["call model/0", "wait for 1", "call model/1", "wait for 1"]


def test_a_batch_is_put_once_and_one_rank_of_a_replica_is_read():
    backend, group = deferred_group({"data": 2, "tensor": 2})
    group.on_grid(batch_of(1, 2))
    assert backend.log.count("put") == 2
    assert backend.log[-4:] == ["wait for 4", "get", "get", "release 4"]
    group.broadcast(batch_of(1, 2))
    assert backend.log.count("put") == 3
    group.double(batch_of(1, 2))
    group.broadcast("text")
    assert backend.log.count("put") == 3


def test_a_failed_call_raises_when_it_is_read_or_releases_its_results():
    backend, group = deferred_group({"data": 2})
    future = group.fail_on_rank_one.remote(batch_of(1, 2))
    assert backend.log == ["call model/0", "call model/1"]
    with pytest.raises(WorkerError, match="rank 1 is unlucky"):
        future.get()
    del future
    with pytest.raises(WorkerError, match="rank 1 is unlucky"):
        group.fail_on_rank_one(batch_of(1, 2))
    assert backend.log[-1] == "release 2"
    assert held_values(backend) == 0


def test_errors_of_uncollected_ranks_are_raised():
    _, group = deferred_group({"data": 1, "tensor": 2})
    with pytest.raises(WorkerError, match="rank 1 is unlucky"):
        group.fail_in_a_replica(batch_of(1, 2))
    future = group.fail_in_a_replica.remote(batch_of(1, 2))
    with pytest.raises(WorkerError, match="rank 1 is unlucky"):
        future.get()
