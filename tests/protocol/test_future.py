"""Futures: exact reads, results without a table, meta_info and errors; test_operations.py has random programs."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.errors import BatchError, FieldError, WorkerError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.protocol.handle import HeldBatch, take


class Logged(HeldBatch):
    """A handle that logs its reads: the columns and rows (None: all), or "get"."""

    def __init__(self, contents: Any):
        super().__init__(DataProto())
        self.contents, self.log = contents, []

    def get(self):
        self.log.append("get")
        return self.contents

    def read(self, columns, rows, *, shared=False):
        self.log.append((columns, rows))
        return take(self.contents, columns, rows)


class Failed(HeldBatch):
    def __init__(self):
        super().__init__(DataProto())

    def get(self):
        raise WorkerError("out of memory", role="actor", rank=1)

    def read(self, columns, rows, *, shared=False):
        return self.get()


def future_of(*parts: DataProto) -> DataProtoFuture:
    names = (*(() if parts[0].batch is None else parts[0].batch.keys()), *parts[0].non_tensor_batch)
    rows = [len(part) for part in parts]
    return DataProtoFuture(DataProto.concat, [Logged(part) for part in parts], None, sum(rows), names, rows)


def undeclared(*parts: Any) -> DataProtoFuture:
    return DataProtoFuture(DataProto.concat, [Logged(part) for part in parts])


def log_of(future: DataProtoFuture) -> list:
    return [entry for handle in future.handles() if isinstance(handle, Logged) for entry in handle.log]


def xy(*rows: int, **meta_info: Any) -> DataProto:
    values = torch.tensor(rows)
    return DataProto.from_dict({"x": values, "y": -values}, meta_info=meta_info)


def column(name: str, *values: int, **meta_info: Any) -> DataProto:
    return DataProto.from_dict({name: torch.tensor(values)}, meta_info=meta_info)


def x_of(future: Any) -> list[int]:
    return future.get("x").batch["x"].tolist()


# Reads


def test_slice_reads_only_the_handles_of_its_rows_and_reorder_each_once():
    future = future_of(xy(1, 2), xy(3, 4), xy(5, 6))
    assert x_of(future.slice(1, 4)) == [2, 3, 4]
    assert [handle.log for handle in future.futures] == [[(("x",), slice(1, 2))], [(("x",), None)], []]
    future = future_of(xy(1, 2), xy(3, 4))
    assert future.select_rows(np.array([3, 0, 2, 1])).rename("y", "z").get("z").batch["z"].tolist() == [-4, -1, -3, -2]
    assert [(columns, rows.tolist()) for columns, rows in log_of(future)] == [(("y",), [0, 1]), (("y",), [1, 0])]


def test_concat_reads_a_renamed_column_by_its_stored_name():
    first, second = future_of(xy(1, 2)), future_of(xy(3)).rename(["x", "y"], ["y", "x"])
    both = DataProtoFuture.concat([first, second])
    assert x_of(both) == [1, 2, -3]
    assert both.rename("y", "z").slice(1).get().batch["z"].tolist() == [-2, 3]
    assert [columns for columns, _ in log_of(both)] == [("x",), ("x", "y"), ("y",), ("y", "x")]
    assert [columns for _, columns in both.select_columns("x").narrow().sources()] == [("x",), ("y",)]


def test_a_read_batch_is_not_shared():
    future = future_of(xy(1, 2, k=1), xy(3, 4, k=1))
    first = future.get()
    first.batch["x"].zero_()
    first.batch["new"] = torch.zeros(4)
    first.meta_info["k"] = 2
    assert x_of(future) == [1, 2, 3, 4]
    assert list(future.get().batch.keys()) == ["x", "y"]
    assert future.get().meta_info == {"k": 1}


def test_get_of_columns_finds_tensors_and_arrays():
    data = DataProto.from_dict({"x": torch.tensor([1]), "y": torch.zeros(1)}, {"o": ["a"]}, {"k": 1})
    for future in (future_of(data), undeclared(data)):
        part = future.get(["o", "x"])
        assert (list(part.batch.keys()), list(part.non_tensor_batch), part.meta_info) == (["x"], ["o"], {"k": 1})
        assert list(future.get("y").batch.keys()) == ["y"]
        with pytest.raises(FieldError, match="the future has no 'z'; it has 'x', 'y', 'o'"):
            future.get("z")


def test_an_error_of_the_call_reaches_every_reader():
    failing = DataProtoFuture(DataProto.concat, [Failed()])
    future = DataProtoFuture(DataProto.concat, [Failed()], None, 2, ("y",), [2])
    for part in (failing, future, future.chunk(2)[0], future.select_columns("y"), future.union(column("x", 1, 2))):
        with pytest.raises(WorkerError, match="out of memory"):
            part.get()


# Results without a table


def test_result_without_a_table_is_collected_dispatched_and_read_once():
    future = DataProtoFuture(DataProto.concat, [Logged(xy(1, 2)), Logged(xy(3))], lambda data: data[1:])
    assert future
    for _ in range(2):
        assert future.get().batch["x"].tolist() == [2, 3]
    assert log_of(future) == ["get", "get"]
    with pytest.raises(BatchError, match="not known before the future is read"):
        len(future)
    others = DataProtoFuture(list, [Logged(1), Logged("two")])
    assert others.get() == [1, "two"]
    with pytest.raises(BatchError, match="returned a list"):
        others.get("x")


def test_results_without_a_table_are_chunked_by_whole_shards():
    first, second = undeclared(xy(1), xy(1, 1)), undeclared(xy(2), xy(2, 2))
    both = DataProtoFuture.concat([first, second, Logged(xy(3))])
    assert x_of(both) == [1, 1, 1, 2, 2, 2, 3]
    with pytest.raises(BatchError, match=r"chunk\(2\) of 5 shards"):
        both.chunk(2)
    halves = DataProtoFuture.concat([first, second]).chunk(2)
    assert [x_of(half) for half in halves] == [[1, 1, 1], [2, 2, 2]]
    with pytest.raises(BatchError, match="some futures declare their columns and others do not"):
        DataProtoFuture.concat([first, future_of(xy(1))])


def test_operation_on_a_result_without_a_table_names_the_fix():
    future = undeclared(xy(1, 2), xy(3, 4))
    for attempt in (
        lambda: future.slice(0, 1), lambda: future.pad_to_divisor(2), lambda: future.select_columns("x"),
        lambda: future.union(xy(1, 2, 3, 4)), lambda: future_of(xy(1, 2)).union(future),
        lambda: future.with_meta_info({"k": 1}), lambda: future.chunk(4), lambda: future.rename("x", "z"),
        lambda: future.select_rows(np.array([0])),
    ):  # fmt: skip
        with pytest.raises(BatchError, match=r"known before it is read; declare writes=.* future.get\(\)"):
            attempt()
    assert future.narrow() is future
    assert log_of(future) == []


def test_pickled_future_drops_the_contents_it_has_read():
    future = undeclared(xy(0))
    before = len(pickle.dumps(future))
    future._contents = DataProto.from_dict({"x": torch.zeros(100_000)})
    assert len(pickle.dumps(future)) == before


# Union, concat and columns


BACKWARDS = np.array([3, 2, 1, 0])


def test_equal_rows_by_other_operations_are_the_same_column():
    future = future_of(xy(1, 2), xy(3, 4))
    for other in (
        future.pad_to_divisor(3).slice(0, 4),
        DataProtoFuture.concat([future.slice(0, 2), future.slice(2, 4)]),
        future.select_rows(BACKWARDS).select_rows(BACKWARDS),
        future.with_meta_info({"step": 1}),
        future.select_columns("x"),
    ):
        assert x_of(future.union(other)) == [1, 2, 3, 4]
    assert x_of(future.slice(1).union(future.slice(1))) == [2, 3, 4]
    assert future.union(future.rename("y", "z")).columns == ("x", "y", "z")


def test_union_of_other_shards_raises_before_reading():
    future = future_of(xy(1, 2), xy(3, 4))
    for other in (
        future_of(xy(1, 2), xy(3, 4)),
        future.select_rows(BACKWARDS),
        future.rename(["x", "y"], ["y", "x"]),
        future.pad_to_divisor(3).slice(1, 5),
        DataProtoFuture.concat([future.slice(2, 4), future.slice(0, 2)]),
        xy(1, 2, 3, 4),
    ):
        with pytest.raises(FieldError, match=r"union: both futures have \['x', 'y'\]; select or rename first"):
            future.union(other)
    assert log_of(future) == []


def test_column_under_two_names_can_be_concatenated_and_sent():
    future = future_of(xy(1, 2, o=object()))
    doubled = future.union(future.rename("x", "z"))
    assert doubled.get(["x", "z"]).batch["z"].tolist() == [1, 2]
    other = future_of(DataProto.from_dict({name: torch.tensor([5]) for name in "xyz"}))
    both = DataProtoFuture.concat([doubled, other])
    assert both.get().batch["z"].tolist() == [1, 2, 5]
    assert [columns for _, columns in both.select_columns(("x", "z")).narrow().sources()] == [("x", "x"), ("x", "z")]


@pytest.mark.parametrize("kind", [DataProtoFuture.of, future_of])
def test_concat_of_renamed_futures_can_be_sent(kind):
    p, q, r = (kind(column(name, start, start + 1)) for start, name in enumerate("pqr"))
    inner = DataProtoFuture.concat([p.rename("p", "q"), q])
    future = DataProtoFuture.concat([inner.rename("q", "x"), r.rename("r", "x")]).slice(1, 5).narrow()
    assert x_of(pickle.loads(pickle.dumps(future))) == [1, 1, 2, 2]
    both = DataProtoFuture.concat([p.rename("p", "x"), q.rename("q", "x")]).select_columns(["x"])
    assert x_of(both.narrow()) == [0, 1, 1, 2]


def test_concat_of_local_batches_pads_with_their_pad_token():
    parts = [DataProto.from_dict({"responses": torch.ones(1, n).long()}, meta_info={"pad_token_id": 7}) for n in (1, 3)]
    joined = DataProtoFuture.concat([DataProtoFuture.of(part) for part in parts])
    assert joined.get().batch["responses"].tolist() == [[1, 7, 7], [1, 1, 1]]


# meta_info


def test_meta_info_of_a_remote_part_is_read_with_its_columns():
    other = column("z", 0, 0, temperature=0.5)
    both = future_of(xy(1, 2)).union(future_of(other))
    assert both.select_columns("x").get().meta_info == {}
    assert both.get(["x", "z"]).meta_info == {"temperature": 0.5}
    assert future_of(xy(1, 2)).union(other).select_columns("x").get().meta_info == {"temperature": 0.5}  # local


def test_rows_of_a_future_have_the_meta_info_of_their_parts():
    future = future_of(xy(1, 2, metrics={"loss": 1.0}), xy(3, 4, metrics={"loss": 2.0}))
    assert future.slice(0, 2).get().meta_info == {"metrics": {"loss": [1.0]}}
    assert future.slice(1, 3).get().meta_info == {"metrics": {"loss": [1.0, 2.0]}}
    assert DataProtoFuture.of(xy(1, metrics={"loss": 1.0})).get().meta_info == {"metrics": {"loss": 1.0}}


def test_a_batch_of_meta_info_alone_joins_a_future():
    extra = DataProto(meta_info={"step": 1})
    for future in (future_of(xy(1, 2)), future_of(DataProto.from_dict(non_tensors={"texts": ["a", "b"]}))):
        assert future.union(extra).get().meta_info == {"step": 1}
    with pytest.raises(BatchError, match="union: 'step' is 5 in one batch and 1 in another"):
        future.with_meta_info({"step": 5}).union(extra)


def test_with_meta_info_replaces_keys_of_the_shards():
    future = future_of(xy(1, 2, step=1, seed=2)).with_meta_info({"step": 5})
    assert future.get().meta_info == future.slice(0, 1).get("x").meta_info == {"step": 5, "seed": 2}
    future.slice(0, 1).meta_info["step"] = 6
    future.rename("x", "z").meta_info["new"] = 1
    assert future.meta_info == {"step": 5}


def test_concat_has_the_keys_that_each_part_was_given():
    parts = [future_of(xy(1, 2, k=0)).with_meta_info(more) for more in ({"k": 1}, {"k": 1, "j": 2})]
    assert DataProtoFuture.concat(parts).get().meta_info == {"k": 1, "j": 2}


# Errors


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda future: future.get("w"), FieldError, "the future has no 'w'; it has 'x', 'y'"),
        (lambda future: future.get(["x", "w"]), FieldError, "has no 'w'; it has 'x', 'y'"),
        (lambda future: future.select_columns(["x", "w"]), FieldError, "has no 'w'; it has 'x', 'y'"),
        (lambda future: future.rename("w", "v"), FieldError, "has no 'w'; it has 'x', 'y'"),
        (lambda future: future.rename("x", "z").get("x"), FieldError, "has no 'x'; it has 'z', 'y'"),
        (lambda future: future.rename("x", "y"), FieldError, "already has one of the new names"),
        (lambda future: future.rename(["x", "y"], "z"), FieldError, "2 old names and 1 different new names"),
        (lambda future: future.union(column("z", 1, 2, 3)), BatchError, "this future has 4 rows, the other has 3"),
        (lambda future: future.slice("a"), BatchError, r"slice\('a', None\): slice indices must be integers"),
        (lambda future: future.select_rows(np.array([0, 1, 2, 4])), BatchError, "row 4 is not in a batch of 4 rows"),
        (lambda future: future.chunk(0), BatchError, "must be at least"),
        (lambda future: future.chunk(3), BatchError, r"4 rows do not make 3 equal parts; pad_to_divisor\(3\) first"),
        (lambda future: future.pad_to_divisor(0), BatchError, "must be at least"),
        (lambda future: DataProtoFuture.concat([]), BatchError, "at least one"),
        (
            lambda future: DataProtoFuture.concat([future, future.select_columns("x")]),
            FieldError,
            r"concat: one future has \('x', 'y'\), another has \('x',\); select the same",
        ),
    ],
)
def test_an_operation_that_is_not_valid_raises_before_reading(attempt, error, message):
    future = future_of(xy(1, 2), xy(3, 4))
    for part in (future, future.slice(0, 4)):
        with pytest.raises(error, match=message):
            attempt(part)
    assert log_of(future) == []


def test_another_number_of_rows_than_declared_is_an_error():
    def declared(num_rows, part_rows):
        return DataProtoFuture(
            DataProto.concat, [Logged(xy(1, 2)), Logged(xy(3))], None, num_rows, ("x", "y"), part_rows
        )

    with pytest.raises(BatchError, match="the future declares 4 rows, but part 1 has 1"):
        declared(4, [2, 2]).get()
    with pytest.raises(BatchError, match="the future declares 1 rows, but has 0"):
        declared(4, [2, 2]).slice(3).get()
    with pytest.raises(BatchError, match="declares 5 rows, but has 3"):
        declared(5, None).get()
