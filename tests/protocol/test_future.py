import pickle

import numpy as np
import pytest
import torch

from hybridflow.errors import BatchError, FieldError, WorkerError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.protocol.handle import HeldBatch, take


class Stored(HeldBatch):
    """A handle of local contents that counts its reads."""

    def __init__(self, contents):
        super().__init__(DataProto())
        self.batch, self.num_reads = contents, 0

    def get(self):
        self.num_reads += 1
        return self.batch

    def read(self, columns, rows, *, shared=False):
        return take(self.get(), columns, rows)


class Failed(HeldBatch):
    def __init__(self):
        super().__init__(DataProto())

    def get(self):
        raise WorkerError("out of memory", role="actor", rank=1)

    def read(self, columns, rows, *, shared=False):
        return self.get()


def handles(*parts: list[int], column: str = "x") -> list[Stored]:
    return [Stored(DataProto.from_dict({column: torch.tensor(part)}, meta_info={"k": 1})) for part in parts]


def future_of(*parts: list[int], column: str = "x", declared: bool = True) -> DataProtoFuture:
    stored = handles(*parts, column=column)
    if not declared:
        return DataProtoFuture(DataProto.concat, stored)
    rows = [len(part) for part in parts]
    return DataProtoFuture(DataProto.concat, stored, num_rows=sum(rows), columns=(column,), part_rows=rows)


def reads_of(future: DataProtoFuture) -> int:
    return sum(handle.num_reads for handle in future.futures if isinstance(handle, Stored))


def test_get_collects_then_dispatches():
    future = DataProtoFuture(DataProto.concat, handles([1, 2], [3]), lambda data: data[1:])
    assert future.get().batch["x"].tolist() == [2, 3]
    assert future.get().meta_info == {"k": 1}


def test_result_without_a_table_is_read_once_and_only_by_get():
    stored = handles([1, 2], [3, 4])
    future, undeclared = future_of([1, 2], [3, 4]), DataProtoFuture(DataProto.concat, stored)
    derived = [*future.select(["x"], ()).rename("x", "y").repeat(2).chunk(4), DataProtoFuture.concat([future, future])]
    assert reads_of(future) == 0
    assert [handle.num_reads for handle in stored] == [0, 0]
    for part in [undeclared, undeclared, *derived]:
        part.get()
    assert [handle.num_reads for handle in stored] == [1, 1]


def test_chunks_are_the_parts_of_the_collected_batch():
    chunks = future_of([1, 2, 3], [4]).chunk(2)
    assert [chunk.get().batch["x"].tolist() for chunk in chunks] == [[1, 2], [3, 4]]
    assert [len(chunk) for chunk in chunks] == [2, 2]


def test_uneven_chunks_are_an_error():
    with pytest.raises(BatchError, match=r"3 rows do not make 2 equal parts; pad_to_divisor\(2\) first"):
        future_of([1, 2, 3]).chunk(2)


def test_concat_takes_handles_and_futures():
    assert DataProtoFuture.concat(handles([1], [2, 3])).get().batch["x"].tolist() == [1, 2, 3]
    joined = DataProtoFuture.concat([future_of([1], [2]), future_of([3])])
    assert joined.get().batch["x"].tolist() == [1, 2, 3]
    assert len(joined) == 3
    assert joined.columns == ("x",)
    with pytest.raises(BatchError, match="at least one"):
        DataProtoFuture.concat([])


def test_select_rename_and_repeat_equal_those_of_the_batch():
    data = DataProto.from_dict({"x": torch.tensor([1, 2]), "y": torch.zeros(2)}, {"o": ["a", "b"]}, {"k": 1, "m": 2})
    future = DataProtoFuture(DataProto.concat, [Stored(data)], num_rows=2, columns=("x", "y", "o"), part_rows=[2])
    result = future.select(["x"], ["o"], ["k"]).rename(["x", "o"], ["z", "p"]).repeat(2, interleave=False)
    assert result.columns == ("z", "p")
    assert len(result) == 4
    batch = result.get()
    assert batch.batch["z"].tolist() == [1, 2, 1, 2]
    assert batch.non_tensor_batch["p"].tolist() == ["a", "b", "a", "b"]
    assert batch.meta_info == {"k": 1}
    assert result.get("p").non_tensor_batch["p"].tolist() == ["a", "b", "a", "b"]


def test_get_of_columns_finds_tensors_and_arrays():
    data = DataProto.from_dict({"x": torch.tensor([1]), "y": torch.zeros(1)}, {"o": ["a"]}, {"k": 1})
    future = DataProtoFuture(DataProto.concat, [Stored(data)])
    part = future.get(["o", "x"])
    assert list(part.batch.keys()) == ["x"]
    assert list(part.non_tensor_batch) == ["o"]
    assert part.meta_info == {"k": 1}
    assert list(future.get("y").batch.keys()) == ["y"]
    with pytest.raises(FieldError, match="the future has no 'z'; it has 'x', 'y', 'o'"):
        future.get("z")


def test_missing_column_of_a_declared_future_raises_before_reading():
    future = future_of([1])
    for attempt in (
        lambda: future.get("z"), lambda: future.select("z"), lambda: future.rename("z", "w"),
    ):  # fmt: skip
        with pytest.raises(FieldError, match="has no 'z'; it has 'x'"):
            attempt()
    assert reads_of(future) == 0


def test_union_of_disjoint_columns():
    both = future_of([1, 2]).union(future_of([3, 4], column="y"))
    assert len(both) == 2
    assert both.columns == ("x", "y")
    assert both.get().batch["x"].tolist() == [1, 2]
    assert both.get().batch["y"].tolist() == [3, 4]


def test_union_reads_only_the_handles_of_the_columns():
    first, second = future_of([1, 2]), future_of([3, 4], column="y")
    both = first.union(second)
    chunk = both.rename("x", "w").repeat(2).chunk(2)[1]
    assert chunk.get("w").batch["w"].tolist() == [2, 2]
    assert reads_of(second) == 0
    assert both.select("y", ()).get().batch["y"].tolist() == [3, 4]
    assert reads_of(first) == reads_of(second) == 1


def test_union_of_the_same_column_is_an_error():
    with pytest.raises(FieldError, match=r"both futures have \['x'\]"):
        future_of([1]).union(future_of([1]))
    with pytest.raises(BatchError, match="this future has 1 rows, the other has 2"):
        future_of([1]).union(future_of([1, 2], column="y"))


def test_rename_onto_an_existing_column_is_an_error():
    both = future_of([1]).union(future_of([2], column="y"))
    with pytest.raises(FieldError, match="already has one of the new names"):
        both.rename("x", "y")
    swapped = both.rename(["x", "y"], ["y", "x"])
    assert swapped.get("x").batch["x"].tolist() == [2]


def test_len_is_the_declared_number_of_rows():
    assert len(future_of([1, 2], [3])) == 3
    undeclared = future_of([1, 2], declared=False)
    assert undeclared
    with pytest.raises(BatchError, match="not known before the future is read"):
        len(undeclared)


def test_undeclared_number_of_rows_is_an_error():
    with pytest.raises(BatchError, match="declares 5 rows, but has 2"):
        DataProtoFuture(DataProto.concat, handles([1, 2]), num_rows=5).get()


def test_two_reads_of_a_future_do_not_share_dicts():
    future = future_of([1, 2])
    first = future.get()
    first.meta_info["k"] = 2
    first.batch["new"] = torch.zeros(2)
    assert future.get().meta_info == {"k": 1}
    assert list(future.get().batch.keys()) == ["x"]


def test_an_error_of_the_call_reaches_every_reader():
    failing, undeclared = Failed(), DataProtoFuture(DataProto.concat, [Failed()])
    future = DataProtoFuture(DataProto.concat, [failing], num_rows=2, columns=("y",), part_rows=[2])
    for part in (undeclared, future, future.chunk(2)[0], future.select("y", ()), future.union(future_of([1, 2]))):
        with pytest.raises(WorkerError, match="out of memory"):
            part.get()


def test_get_returns_other_results_unchanged():
    future = DataProtoFuture(list, [Stored(1), Stored("two")])
    assert future.get() == [1, "two"]
    with pytest.raises(BatchError, match="returned a list"):
        future.get("x")


def test_pickled_future_drops_the_contents_it_has_read():
    future = future_of([0], declared=False)
    before = len(pickle.dumps(future))
    future._contents = DataProto.from_dict({"x": torch.zeros(100_000)})
    assert len(pickle.dumps(future)) == before
    chunk = future_of([0]).rename("x", "y").select("y", ()).repeat(2).chunk(2)[1]
    assert pickle.loads(pickle.dumps(chunk)).get("y").batch["y"].tolist() == [0]
    union = future_of([1]).union(future_of([2], column="z"))
    assert pickle.loads(pickle.dumps(union)).get().batch["z"].tolist() == [2]


def test_union_keeps_non_tensor_columns():
    texts = [Stored(DataProto.from_dict(non_tensors={"o": np.array(["a"])}))]
    first = DataProtoFuture(DataProto.concat, texts, num_rows=1, columns=("o",), part_rows=[1])
    assert first.union(future_of([1])).get().non_tensor_batch["o"].tolist() == ["a"]
