"""Complete calls on a group of ranks in this process: what each rank receives, and what the caller gets."""

import os
import traceback
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

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
)
from hybridflow.errors import BatchError, DispatchError, FieldError, WorkerError
from hybridflow.protocol import DataProto, DataProtoConfig, DataProtoFuture
from hybridflow.protocol.handle import Duration

on_train_mesh = make_nd_compute_dataproto_dispatch_fn(mesh_name="train", split_axes=("data",))


class Model(Worker):
    def __init__(self, config=None):
        self.received = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("doubled",))
    def double(self, batch, factor=2):
        self.received.append(batch)
        return DataProto.from_dict(tensors={"doubled": batch.batch["x"] * factor})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch, *others):
        self.received.append(batch)
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("x",), rows=2)
    def twice(self, batch):
        return batch.repeat(2)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=(), rows="one")
    def update(self, batch):
        return DataProto(meta_info={"metrics": {"loss": float(batch.batch["x"].sum())}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def silent_update(self, batch):
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, writes=("doubled",))
    def double_later(self, batch):
        return DataProto.from_dict(tensors={"doubled": batch.batch["x"] * 2})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, materialize_futures=False, reads=("doubled",))
    def read_future(self, future):
        assert isinstance(future, DataProtoFuture)
        batch = future.get()
        batch.batch["doubled"] += self.rank
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, first, second):
        return DataProto.from_dict(tensors={"sum": first.batch["x"] + second.batch["y"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def drop_a_row(self, batch):
        return batch.slice(1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def other_columns_on_rank_one(self, batch):
        return batch.rename("x", "y") if self.rank == 1 else batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def total(self, batch):
        return float(batch.batch["x"].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, batch=None):
        return 0.0 if batch is None else float(batch.batch["x"].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def each(self, batch):
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function, batch):
        return DataProto.from_dict(tensors={"x": function(batch.batch["x"])})

    @register(dispatch_mode=on_train_mesh)
    def on_mesh(self, batch):
        self.received.append(batch)
        return DataProto.from_dict(tensors={"x": batch.batch["x"] * 10 + self.rank})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def broadcast(self, value):
        self.received.append(value)
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, value, key=None):
        return self.rank, value, key

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, value):
        self.received.append(value)
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def num_received(self):
        return len(self.received)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_received(self):
        return self.received[-1]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.SEQUENTIAL)
    def in_turn(self):
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def fail_on_rank_one(self, batch):
        if self.rank == 1:
            raise ValueError("rank 1 is unlucky")
        return batch


def make_group(num_ranks=2, **kwargs):
    return WorkerGroup(ResourcePool([num_ranks]), ClassWithInitArgs(Model), name="model", **kwargs)


def batch_of(*values, **columns):
    return DataProto.from_dict(tensors={"x": torch.tensor(values)}, **columns)


def received(group, column="x"):
    return [batch.batch[column].tolist() for batch in group.last_received()]


# Splitting, padding, collecting


def test_rows_are_split_over_the_ranks_and_collected_in_order():
    group = make_group(2)
    assert group.double(batch_of(1, 2, 3, 4)).batch["doubled"].tolist() == [2, 4, 6, 8]
    assert received(group) == [[1, 2], [3, 4]]


def test_parts_of_an_uneven_batch_differ_by_one_row():
    group = make_group(4)
    batch = batch_of(1, 2, 3, 4, 5, 6, non_tensors={"names": list("abcdef")})
    result = group.echo(batch)
    assert received(group) == [[1, 2], [3, 4], [5], [6]]
    assert result.batch["x"].tolist() == [1, 2, 3, 4, 5, 6]
    assert list(result.non_tensor_batch["names"]) == list("abcdef")
    assert len(batch) == 6


def test_auto_padding_makes_equal_parts_with_copies_of_the_first_rows():
    group = make_group(4)
    batch = batch_of(1, 2, 3, 4, 5, 6, non_tensors={"names": list("abcdef")}, auto_padding=True)
    result = group.echo(batch)
    assert received(group) == [[1, 2], [3, 4], [5, 6], [1, 2]]
    assert result.batch["x"].tolist() == [1, 2, 3, 4, 5, 6]
    assert list(result.non_tensor_batch["names"]) == list("abcdef")
    assert len(batch) == 6


def test_fewer_rows_than_ranks_are_padded_cyclically():
    group = make_group(5)
    assert group.double(batch_of(1, 2)).batch["doubled"].tolist() == [2, 4]
    assert received(group) == [[1], [2], [1], [2], [1]]


def test_padded_copies_have_row_id_minus_one():
    group = make_group(2)
    batch = DataProto.from_dict(tensors={"row_ids": torch.tensor([7, 8, 9])}, auto_padding=True)
    assert group.echo(batch).batch["row_ids"].tolist() == [7, 8, 9]
    assert received(group, "row_ids") == [[7, 8], [9, -1]]


def test_padding_is_removed_from_a_future_too():
    group = make_group(4)
    future = group.double.remote(batch_of(1, 2, 3))
    assert isinstance(future, DataProtoFuture)
    assert len(future) == 3
    assert future.columns == ("doubled",)
    assert future.get().batch["doubled"].tolist() == [2, 4, 6]


def test_unpadding_handles_several_output_rows_per_input_row():
    group = make_group(2)
    assert group.twice(batch_of(1, 2, 3)).batch["x"].tolist() == [1, 1, 2, 2, 3, 3]
    future = group.twice.remote(batch_of(1, 2, 3))
    assert len(future) == 6
    assert future.get().batch["x"].tolist() == [1, 1, 2, 2, 3, 3]


def test_padding_is_removed_from_a_list_of_results():
    group = make_group(4)
    parts = group.each(batch_of(1, 2, 3, 4, 5, auto_padding=True))
    assert [part.batch["x"].tolist() for part in parts] == [[1, 2], [3, 4], [5]]


def test_metrics_of_an_uneven_batch_count_each_row_once():
    group = make_group(2)
    assert group.update(batch_of(1, 2, 3)).meta_info == {"metrics": {"loss": [3.0, 3.0]}}
    assert group.update.remote(batch_of(1, 2, 3)).get().meta_info == {"metrics": {"loss": [3.0, 3.0]}}


SPLITTING = [name for name, mode in DISPATCH_MODES.items() if mode.part_of_rank is not None]
"""The built-in modes that split a batch; tests register others."""


def counting_group(mode):
    """Return a group of four ranks whose method counts rows, in one replica per rank, without knowing of padding."""
    takes_function = mode is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC
    is_list = mode.collect_fn is Dispatch.ALL_TO_ALL.collect_fn

    class Counter(Worker):
        @register(dispatch_mode=mode, rows="one")
        def count(self, *arguments):
            ones = float(arguments[-1].batch["x"].sum())
            return ones if is_list else DataProto(meta_info={"metrics": {"ones": ones}})

    group = WorkerGroup(ResourcePool([4]), ClassWithInitArgs(Counter))

    def count(batch, call=group.count):
        result = call(*([len] if takes_function else []), batch)
        return sum(result if is_list else result.meta_info["metrics"]["ones"])

    return group, count


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize("name", SPLITTING)
def test_a_method_that_knows_nothing_of_padding_counts_every_row_once(name, num_rows):
    group, count = counting_group(DISPATCH_MODES[name])
    assert count(batch_of(*[1] * num_rows)) == num_rows
    assert count(batch_of(*[1] * num_rows), call=lambda *a: group.count.remote(*a).get()) == num_rows


@pytest.mark.parametrize("name", SPLITTING)
def test_numbers_that_count_copies_are_an_error(name, monkeypatch):
    _, count = counting_group(DISPATCH_MODES[name])
    with pytest.raises(DispatchError, match=r"for a batch with padded copies \(1\), which would count as rows; turn"):
        count(batch_of(1, 1, 1, 1, 1, 1, 1, auto_padding=True))
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    with pytest.raises(DispatchError, match=r"copies \(1\), .* or declare reads with 'row_ids'"):
        count(batch_of(1, 1, 1, 1, 1))
    assert count(batch_of(1, 1)) == 2
    assert count(batch_of(1, 1, 1, 1)) == 4
    assert count(batch_of(1, 1, 1, 1, 1, 1)) == 6  # the last rank has copies only


@pytest.mark.parametrize("name", SPLITTING)
def test_a_tensordict_of_rows_is_not_sent_whole_to_every_rank(name):
    group, _ = counting_group(DISPATCH_MODES[name])
    rows, weights = TensorDict({"x": torch.ones(4)}, [4]), TensorDict({"x": torch.ones(4)}, [])
    for value, valid in ((rows, False), (weights, True)):
        with (
            nullcontext() if valid else pytest.raises(DispatchError, match=r"a TensorDict of 4 rows|the arguments are")
        ):
            group.count(*([len] if "WITH_FUNC" in name else []), value, batch_of(1, 1, 1, 1))


def test_a_method_that_reads_row_ids_may_get_copies():
    class Aware(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, reads=("x", "row_ids"))
        def count(self, batch):
            return int(batch.batch["x"][batch.batch["row_ids"] >= 0].sum())

    group = WorkerGroup(ResourcePool([4]), ClassWithInitArgs(Aware))
    columns = {"x": torch.ones(5), "row_ids": torch.arange(5)}
    assert group.count(DataProto.from_dict(columns, auto_padding=True)) == [2, 2, 1]


def test_a_method_may_return_none():
    assert make_group(2).silent_update(batch_of(1, 2, 3)) is None


def test_the_batch_of_the_caller_is_not_changed():
    batch = batch_of(1, 2, 3, meta_info={"step": 1})
    group = make_group(2)
    group.echo(batch).batch["x"].fill_(9)
    assert batch.batch["x"].tolist() == [1, 2, 3]
    assert batch.meta_info == {"step": 1}


def test_two_batches_are_split_alike():
    second = DataProto.from_dict(tensors={"y": torch.tensor([10, 20, 30])})
    group = make_group(2)
    assert group.add(batch_of(1, 2, 3), second).batch["sum"].tolist() == [11, 22, 33]
    assert group.add(second=second, first=batch_of(1, 2, 3)).batch["sum"].tolist() == [11, 22, 33]


def test_batches_of_different_lengths_are_an_error():
    with pytest.raises(DispatchError, match=r"Model\.add was called with batches of 3 and 2 rows"):
        make_group(2).add(batch_of(1, 2, 3), batch_of(1, 2))


def test_an_empty_batch_is_an_error():
    with pytest.raises(DispatchError, match=r"Model\.echo was called with a batch of 0 rows"):
        make_group(2).echo(batch_of())
    with pytest.raises(DispatchError, match="0 rows"):
        make_group(2).echo(DataProto(meta_info={"step": 1}))


def test_error_for_arguments_without_a_batch_names_the_method():
    with pytest.raises(DispatchError, match=r"Model\.echo: this mode splits a DataProto.*the arguments are dict"):
        make_group(2).echo({"x": 1})


def test_without_arguments_every_rank_is_called():
    assert make_group(2).metric() == [0.0, 0.0]


def test_keywords_and_other_arguments_reach_every_rank():
    assert make_group(2).double(batch=batch_of(1, 2), factor=3).batch["doubled"].tolist() == [3, 6]
    assert make_group(2).double(batch_of(1, 2), 5).batch["doubled"].tolist() == [5, 10]


def test_metrics_are_collected_in_a_list():
    assert make_group(2).metric(batch_of(1, 2, 3, 4)) == [3.0, 7.0]


def test_a_function_goes_to_every_rank():
    assert make_group(2).apply(lambda x: x + 1, batch_of(1, 2, 3)).batch["x"].tolist() == [2, 3, 4]


def test_error_for_failed_concatenation_names_the_method():
    with pytest.raises(DispatchError, match=r"Model\.total: output 0 of 2 is float"):
        make_group(2).total(batch_of(1, 2))


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


def test_a_missing_column_is_an_error_before_sending():
    group = make_group(2)
    with pytest.raises(FieldError, match=r"Model\.double needs 'x', but the batch has y"):
        group.double(batch_of(1, 2).rename("x", "y"))
    assert group.num_received() == [0, 0]


def test_a_method_that_reads_no_column_gets_its_rows_and_meta_info():
    class Counter(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, reads=())
        def count(self, batch):
            return len(batch), batch.meta_info

    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Counter))
    assert group.count(batch_of(1, 2, 3, meta_info={"step": 1})) == [(2, {"step": 1}), (1, {"step": 1})]
    texts = DataProto.from_dict(non_tensors={"texts": ["a", "b"]}, meta_info={"step": 1})
    assert [meta_info for _, meta_info in group.count(texts)] == [{"step": 1}, {"step": 1}]


def test_error_for_wrong_number_of_rows_names_method_and_rank():
    with pytest.raises(DispatchError, match=r"Model\.drop_a_row on rank 0 returned 1 rows for 2"):
        make_group(2).drop_a_row(batch_of(1, 2, 3, 4))


def test_error_for_different_columns_on_ranks_names_the_method():
    with pytest.raises(FieldError) as caught:
        make_group(2).other_columns_on_rank_one(batch_of(1, 2))
    assert caught.value.__notes__ == ["while collecting the results of Model.other_columns_on_rank_one"]


# Other modes


def test_every_rank_gets_its_own_copy_of_a_broadcast_value():
    group = make_group(2)
    assert group.broadcast([1, 2]) == [(0, [1, 2]), (1, [1, 2])]
    batch = batch_of(1, 2)
    (_, first), (_, second) = group.broadcast(batch)
    first.batch["x"].fill_(0)
    assert second.batch["x"].tolist() == batch.batch["x"].tolist() == [1, 2]


def test_rank_zero_calls_return_a_value_instead_of_a_list():
    group = make_group(2)
    assert group.on_rank_zero([1, 2], key="k") == (0, [1, 2], "k")
    assert group.on_rank_zero.remote([1, 2]).get() == (0, [1, 2], None)
    assert group.rank_zero("v") == (0, "v")
    assert group.num_received() == [1, 0]


def test_ranks_of_a_replica_get_the_same_rows_and_one_is_collected():
    group = make_group(4, meshes={"train": {"data": 2, "tensor": 2}})
    assert group.on_mesh(batch_of(1, 2, 3)).batch["x"].tolist() == [10, 20, 32]
    assert received(group) == [[1, 2], [1, 2], [3], [3]]
    assert group.on_mesh.remote(batch_of(1, 2, 3)).get().batch["x"].tolist() == [10, 20, 32]


def test_ranks_of_a_replica_do_not_share_memory():
    group = make_group(2, meshes={"train": {"data": 1, "tensor": 2}})
    group.on_mesh(batch_of(1, 2))
    workers: list[Any] = group.workers
    first, second = (worker.instance.received[0].batch["x"] for worker in workers)
    assert first.data_ptr() != second.data_ptr()


def test_a_mode_for_an_unknown_mesh_is_an_error():
    with pytest.raises(DispatchError, match="no mesh 'train'"):
        make_group(2).on_mesh(batch_of(1, 2))


def test_sequential_calls_run_in_rank_order():
    assert make_group(3).in_turn() == [0, 1, 2]


def test_a_registered_mode_may_reorder_parts_and_request_padding():
    def dispatch_reversed(group, batch):
        return [batch.chunk(group.world_size)[::-1]], {}

    def collect_reversed(group, outputs):
        return DataProto.concat(outputs[::-1])

    register_dispatch_mode("REVERSED", dispatch_reversed, collect_reversed, num_parts=lambda group: group.world_size)
    try:

        class Own(Worker):
            @register(dispatch_mode=Dispatch.REVERSED)
            def tag(self, batch):
                return DataProto.from_dict(tensors={"x": batch.batch["x"], "rank": batch.batch["x"] * 0 + self.rank})

        group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Own))
        result = group.tag(batch_of(1, 2, 3))
        assert result.batch["x"].tolist() == [1, 2, 3]
        assert result.batch["rank"].tolist() == [1, 1, 0]
    finally:
        del DISPATCH_MODES["REVERSED"]


def test_dispatch_fn_must_return_one_argument_for_each_rank():
    class Own(Worker):
        @register(dispatch_mode={"dispatch_fn": lambda group, x: ([[x]], {}), "collect_fn": lambda group, out: out})
        def run(self, x):
            return x

    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Own))
    with pytest.raises(DispatchError, match=r"Own\.run: .* for argument 0; .* one element for each of the 2 ranks"):
        group.run(1)


# Futures


def test_blocking_false_returns_a_future():
    future = make_group(2).double_later(batch_of(1, 2, 3))
    assert isinstance(future, DataProtoFuture)
    assert future.get().batch["doubled"].tolist() == [2, 4, 6]


def test_a_future_is_an_argument_of_another_group():
    first, second = make_group(2), make_group(3)
    future = first.double.remote(batch_of(1, 2, 3, 4))
    assert second.double(future.rename("doubled", "x")).batch["doubled"].tolist() == [4, 8, 12, 16]
    assert second.broadcast(future)[2][1].batch["doubled"].tolist() == [2, 4, 6, 8]
    parts = second.each([future, future, future])
    assert [len(part) for part in parts] == [4, 4, 4]


def test_concatenated_futures_are_split_again():
    group = make_group(2)
    future = DataProtoFuture.concat([group.double.remote(batch_of(1, 2, 3)), group.double.remote(batch_of(4))])
    assert len(future) == 4
    assert group.echo(future).batch["doubled"].tolist() == [2, 4, 6, 8]


def test_a_worker_can_receive_an_unread_future():
    group = make_group(2)
    future = group.double.remote(batch_of(1, 2, 3))
    assert group.read_future(future).batch["doubled"].tolist() == [2, 4, 7]
    assert future.get().batch["doubled"].tolist() == [2, 4, 6]


def test_a_missing_column_of_an_unread_future_is_an_error():
    group = make_group(2)
    future = group.twice.remote(batch_of(1, 2))
    with pytest.raises(FieldError, match=r"Model\.read_future needs 'doubled', but the batch has x"):
        group.read_future(future)


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
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def update(self, batch):
            return DataProto(meta_info={"metrics": {"loss": 1.0}})

    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Undeclared))
    assert group.update.remote(batch_of(1, 2, 3)).get().meta_info == {"metrics": {"loss": [1.0, 1.0]}}


def test_local_results_are_computed_at_once_and_kept_by_the_future():
    backend = LocalBackend()
    group = make_group(2, backend=backend)
    future = group.double.remote(batch_of(1, 2))
    assert group.num_received() == [1, 1]
    assert backend.num_objects == 2
    future.get()
    del future
    assert backend.num_objects == 0


def test_blocking_calls_release_all_values():
    backend = LocalBackend()
    group = make_group(4, backend=backend, meshes={"train": {"data": 2, "tensor": 2}})
    for _ in range(3):
        group.double(batch_of(1, 2, 3))
        group.on_mesh(batch_of(1, 2, 3))
        group.broadcast(batch_of(1))
        group.double(group.double.remote(batch_of(1)).rename("doubled", "x"))
        with pytest.raises(WorkerError):
            group.fail_on_rank_one(batch_of(1, 2))
        with pytest.raises(DispatchError):
            group.total(batch_of(1, 2))
    assert backend.num_objects == 0


# The path of a call, as docs/architecture.md shows it


def test_a_call_has_three_frames_between_caller_and_worker():
    class Deep(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("x",))
        def compute(self, batch):
            stack = traceback.extract_stack()
            self.path = [frame.name for frame in stack if "hybridflow/controller" in frame.filename]
            return batch

    group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Deep))
    group.compute.remote(batch_of(1, 2))
    workers: list[Any] = group.workers
    assert workers[0].instance.path == ["remote", "send", "call_all"]


# Failures


def test_error_names_the_rank_and_keeps_its_cause():
    with pytest.raises(WorkerError, match=r"Model\.fail_on_rank_one failed on worker model/1: ValueError") as caught:
        make_group(2).fail_on_rank_one(batch_of(1, 2))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_non_blocking_local_call_raises_its_error_at_once():
    with pytest.raises(WorkerError, match="rank 1 is unlucky"):
        make_group(2).fail_on_rank_one.remote(batch_of(1, 2))


def test_a_worker_may_call_another_group():
    inner = make_group(2)

    class Outer(Worker):
        @register(dispatch_mode=Dispatch.RANK_ZERO)
        def run(self, call_inner):
            before = os.environ["RANK"], os.environ["WORLD_SIZE"]
            result = call_inner()
            return before, result, (os.environ["RANK"], os.environ["WORLD_SIZE"])

    outer = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Outer))
    assert outer.run(lambda: inner.in_turn()) == (("0", "1"), [0, 1], ("0", "1"))


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


def test_all_ranks_start_before_the_first_wait():
    backend = DeferredBackend()
    group = make_group(2, backend=backend)
    assert group.double(batch_of(1, 2, 3)).batch["doubled"].tolist() == [2, 4, 6]
    assert backend.log == ["call model/0", "call model/1", "wait for 2", "release 2"]
    assert backend.num_objects == 0


def test_sequential_execution_waits_for_each_rank_without_reading():
    backend = DeferredBackend()
    group = make_group(2, backend=backend)
    group.in_turn()
    assert backend.log[:4] == ["call model/0", "wait for 1", "call model/1", "wait for 1"]


def test_a_batch_sent_to_several_ranks_is_put_once():
    backend = DeferredBackend()
    group = make_group(4, backend=backend, meshes={"train": {"data": 2, "tensor": 2}})
    group.on_mesh(batch_of(1, 2))
    assert backend.log.count("put") == 2
    group.broadcast(batch_of(1, 2))
    assert backend.log.count("put") == 3
    group.double(batch_of(1, 2))
    group.broadcast("text")
    assert backend.log.count("put") == 3


def test_only_one_rank_of_a_replica_is_read():
    backend = DeferredBackend()
    group = make_group(4, backend=backend, meshes={"train": {"data": 2, "tensor": 2}})
    group.on_mesh(batch_of(1, 2))
    assert backend.log[-4:] == ["wait for 4", "get", "get", "release 4"]


def test_a_non_blocking_call_returns_at_once_and_raises_on_read():
    backend = DeferredBackend()
    group = make_group(2, backend=backend)
    future = group.fail_on_rank_one.remote(batch_of(1, 2))
    assert backend.log == ["call model/0", "call model/1"]
    with pytest.raises(WorkerError, match="rank 1 is unlucky"):
        future.get()


def test_errors_of_uncollected_ranks_are_raised():
    class Replica(Worker):
        @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
        def run(self, batch):
            if self.rank == 1:
                raise ValueError("rank 1 is unlucky")
            return batch

    meshes = {"default": {"data": 1, "tensor": 2}}
    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Replica), backend=DeferredBackend(), meshes=meshes)
    with pytest.raises(WorkerError, match="rank 1 is unlucky"):
        group.run(batch_of(1, 2))
    future = group.run.remote(batch_of(1, 2))
    with pytest.raises(WorkerError, match="rank 1 is unlucky"):
        future.get()


def test_a_failed_blocking_call_releases_its_results():
    backend = DeferredBackend()
    group = make_group(2, backend=backend)
    with pytest.raises(WorkerError, match="rank 1 is unlucky"):
        group.fail_on_rank_one(batch_of(1, 2))
    assert backend.log[-1] == "release 2"
    assert backend.num_objects == 0
