"""Operations on futures equal those on batches, and read only the handles, columns and rows that are needed."""

import pickle
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor
from hybridflow.protocol.handle import HeldBatch, take
from hybridflow.protocol.packed_batch import PackedBatch


class Logged(HeldBatch):
    """A handle that logs the columns and rows of each read (None: all)."""

    def __init__(self, number: int, contents: DataProto, is_packed: bool = False):
        super().__init__(contents)
        self.number, self.contents, self.log = number, contents, []
        self.packed = PackedBatch.pack(contents, pickle.dumps) if is_packed else None

    def get(self):
        return self.read(None, None)

    def read(self, columns, rows, *, shared=False):
        self.log.append((columns, rows))
        return take(self.contents, columns, rows) if self.packed is None else self.packed.read(columns, rows, shared)


def future_of(*parts: DataProto) -> DataProtoFuture:
    handles = [Logged(index, part) for index, part in enumerate(parts)]
    names = (*(() if parts[0].batch is None else parts[0].batch.keys()), *parts[0].non_tensor_batch)
    rows = [len(part) for part in parts]
    return DataProtoFuture(DataProto.concat, handles, num_rows=sum(rows), columns=names, part_rows=rows)


def log_of(future: DataProtoFuture) -> list:
    return [entry for handle in future.handles() if isinstance(handle, Logged) for entry in handle.log]


def xy(*rows: int, meta_info: dict | None = None) -> DataProto:
    values = torch.tensor(rows)
    return DataProto.from_dict({"x": values, "y": -values}, meta_info=meta_info)


def names_of(batch: DataProto) -> list[str]:
    return [*(() if batch.batch is None else batch.batch.keys()), *batch.non_tensor_batch]


# Random programs. Every cell encodes its origin: tensors and texts hold (base * 10 + column) * 1000 + row.


@dataclass
class Pair:
    """A future, the equal batch, and that batch with unmarked padding copies, whose cells encode their origin."""

    future: DataProtoFuture
    batch: DataProto
    origin: DataProto

    def then(self, future: DataProtoFuture, change: Any) -> "Pair":
        return Pair(future, change(self.batch), change(self.origin))


class Program:
    """Up to eight random operations on futures and on the equal batches."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.handles: list[Logged] = []
        self.place_of: list[tuple[int, int]] = []  # per handle: its base and its first row in it
        self.num_bases, self.num_names = 0, 0
        self.is_packed = seed % 2 == 1
        self.steps: list[str] = []
        self.result = self.new_base([self.random.randint(0, 4) for _ in range(self.random.randint(1, 4))], True)
        for _ in range(self.random.randint(1, 8)):
            step = self.random.choice([name for name in dir(self) if name.startswith("do_")])
            self.steps.append(step)
            self.result = getattr(self, step)(self.result)

    def new_base(self, part_rows: list[int], has_row_ids: bool = False) -> Pair:
        base, total = self.num_bases, sum(part_rows)
        self.num_bases += 1
        cells = [[(base * 10 + column) * 1000 + row for row in range(total)] for column in range(5)]
        whole = DataProto.from_dict(
            {
                f"t{base}": torch.tensor(cells[0], dtype=torch.int64),
                f"wide{base}": torch.tensor(cells[1], dtype=torch.float64).reshape(total, 1).expand(total, 2),
                ("row_ids" if has_row_ids else f"ids{base}"): torch.tensor(cells[2], dtype=torch.int64),
            },
            {f"object{base}": [{"cell": cell} for cell in cells[3]], f"text{base}": np.array(cells[4]).astype("U6")},
            {f"of base {base}": [base]},
        )
        handles, start = [], 0
        for rows in part_rows:
            handles.append(Logged(len(self.handles), whole.slice(start, start + rows), self.is_packed))
            self.handles.append(handles[-1])
            self.place_of.append((base, start))
            start += rows
        future = DataProtoFuture(
            DataProto.concat, handles, num_rows=total, columns=tuple(names_of(whole)), part_rows=part_rows
        )
        return Pair(future, whole, whole)

    def some(self, names: list[str]) -> list[str]:
        return self.random.sample(names, self.random.randint(1, len(names))) if names else []

    def do_slice(self, pair: Pair) -> Pair:
        start, end = (self.random.choice([None, *range(-3, len(pair.batch) + 2)]) for _ in range(2))
        return pair.then(pair.future.slice(start, end), lambda batch: batch.slice(start, end))

    def do_chunk(self, pair: Pair) -> Pair:
        chunks = self.random.choice([n for n in (1, 2, 3, 4) if len(pair.batch) % n == 0])
        index = self.random.randrange(chunks)
        return pair.then(pair.future.chunk(chunks)[index], lambda batch: batch.chunk(chunks)[index])

    def do_repeat(self, pair: Pair) -> Pair:
        times, interleave = self.random.randint(0 if self.random.random() < 0.1 else 1, 3), self.random.random() < 0.5
        if len(pair.batch) > 15:
            return pair
        return pair.then(pair.future.repeat(times, interleave), lambda batch: batch.repeat(times, interleave))

    def do_reorder(self, pair: Pair) -> Pair:
        order = self.random.sample(range(len(pair.batch)), len(pair.batch))
        return pair.then(pair.future.reorder(order), lambda batch: batch.reorder(order))

    def do_rename(self, pair: Pair) -> Pair:
        old = self.some(names_of(pair.batch))
        if self.random.random() < 0.5:
            new = self.random.sample(old, len(old))
        else:
            new = [f"name{self.num_names + index}" for index in range(len(old))]
            self.num_names += len(old)
        return pair.then(pair.future.rename(old, new), lambda batch: batch.rename(old, new))

    def do_select(self, pair: Pair) -> Pair:
        tensors, arrays = list(pair.batch.batch.keys()), list(pair.batch.non_tensor_batch)
        chosen = self.some(tensors), self.some(arrays)
        return pair.then(pair.future.select(*chosen), lambda batch: batch.select(*chosen))

    def do_pop(self, pair: Pair) -> Pair:
        tensors, arrays = self.some(list(pair.batch.batch.keys())), self.some(list(pair.batch.non_tensor_batch))
        popped = pair.future.pop(tensors, arrays)
        if self.random.random() < 0.5 or not pair.future.columns:
            return pair.then(popped, lambda batch: batch.select(tensors, arrays, []))
        rest = [name for name in names_of(pair.batch) if name not in (*tensors, *arrays)]
        return pair.then(pair.future, lambda batch: take(batch, rest))

    def do_select_columns(self, pair: Pair) -> Pair:
        chosen = self.some(names_of(pair.batch))
        return pair.then(pair.future.select_columns(chosen), lambda batch: take(batch, chosen))

    def do_union_of_others(self, pair: Pair) -> Pair:
        cuts = sorted(self.random.randint(0, len(pair.batch)) for _ in range(self.random.randint(0, 3)))
        edges = [0, *cuts, len(pair.batch)]
        other = self.new_base([end - start for start, end in pairwise(edges)])
        if self.random.random() < 0.5:
            other = self.do_rename(self.do_reorder(other))
        if self.random.random() < 0.3:
            pair, other = other, pair
        return Pair(pair.future.union(other.future), pair.batch.union(other.batch), pair.origin.union(other.origin))

    def do_union_of_a_batch(self, pair: Pair) -> Pair:
        other = self.new_base([len(pair.batch)])
        return Pair(pair.future.union(other.batch), pair.batch.union(other.batch), pair.origin.union(other.origin))

    def do_union_of_the_same_origin(self, pair: Pair) -> Pair:
        if pair.future.columns is None:
            return pair
        chosen = self.some(names_of(pair.batch))
        return pair.then(pair.future.union(pair.future.select_columns(chosen)), lambda batch: batch.select())

    def do_concat(self, pair: Pair) -> Pair:
        if len(pair.batch) > 15:
            return pair
        first, second = self.do_slice(pair), self.do_slice(pair)
        future = DataProtoFuture.concat([first.future, pair.future, second.future])
        batches = [[getattr(part, kind) for part in (first, pair, second)] for kind in ("batch", "origin")]
        return Pair(future, *map(DataProto.concat, batches))

    def do_pad_to_divisor(self, pair: Pair) -> Pair:
        divisor = self.random.randint(1, 5)
        padded, _ = pad_dataproto_to_divisor(pair.batch, divisor)
        copies = np.arange(len(padded)) % max(len(pair.batch), 1)
        return Pair(pair.future.pad_to_divisor(divisor), padded, pair.origin.select_idxs(copies))

    def needed(self, origin: DataProto) -> dict[int, tuple[set[int], set[int]]]:
        """Return the columns (by number) and rows of these cells for each handle that holds some of them."""
        needed: dict[int, tuple[set[int], set[int]]] = {}
        for name in names_of(origin):
            column = origin.non_tensor_batch[name] if name in origin.non_tensor_batch else origin.batch[name]
            for cell in map(cell_number, column):
                for number, (base, start) in enumerate(self.place_of):
                    row = cell % 1000 - start
                    if cell // 10_000 == base and 0 <= row < len(self.handles[number].contents):
                        columns, rows = needed.setdefault(number, (set(), set()))
                        columns.add(cell // 1000 % 10)
                        rows.add(row)
        return needed

    def check_reads(self, origin: DataProto) -> None:
        """Assert that the reads since the last check returned only what these cells need, or no rows."""
        needed = self.needed(origin)
        for number, handle in enumerate(self.handles):
            of_columns = {name: index for index, name in enumerate(names_of(handle.contents))}
            for columns, rows in handle.log:
                read_rows = set(np.arange(len(handle.contents))[slice(None) if rows is None else rows].tolist())
                if not read_rows or columns == ():
                    continue
                read_columns = {of_columns[name] for name in (of_columns if columns is None else columns)}
                columns_needed, rows_needed = needed.get(number, (set(), set()))
                assert read_columns <= columns_needed
                assert read_rows <= rows_needed
            handle.log.clear()


def cell_number(cell: Any) -> int:
    if isinstance(cell, dict):
        return cell["cell"]
    return int(cell.flatten()[0]) if isinstance(cell, torch.Tensor) else int(cell)


def assert_same(found: DataProto, expected: DataProto, has_all_meta_info: bool = True) -> None:
    assert len(found) == len(expected)
    assert set(() if found.batch is None else found.batch.keys()) == set(expected.batch.keys())
    assert set(found.non_tensor_batch) == set(expected.non_tensor_batch)
    for name, column in expected.batch.items():
        assert found.batch[name].dtype == column.dtype
        assert torch.equal(found.batch[name], column)
    for name, column in expected.non_tensor_batch.items():
        assert found.non_tensor_batch[name].dtype.kind == column.dtype.kind
        assert found.non_tensor_batch[name].tolist() == column.tolist()
    assert found.meta_info.items() <= expected.meta_info.items()
    if has_all_meta_info:
        assert found.meta_info == expected.meta_info


SEEDS = range(300)


@pytest.mark.parametrize("seed", SEEDS)
def test_operations_on_futures_equal_those_on_batches(seed):
    program = Program(seed)
    future, batch = program.result.future, program.result.batch
    assert [handle.log for handle in program.handles] == [[]] * len(program.handles)
    assert len(future) == len(batch)
    assert future.columns is None or set(future.columns) == set(names_of(batch))
    assert_same(future.get(), batch, has_all_meta_info=program.num_bases == 1)
    columns = program.some(names_of(batch))
    assert_same(future.get(columns), take(batch, columns), has_all_meta_info=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_needed_handles_columns_and_rows_are_read(seed):
    program = Program(seed)
    future, origin = program.result.future, program.result.origin
    future.get()
    program.check_reads(origin)
    for columns in (program.some(names_of(origin)), program.some(names_of(origin))[:1]):
        future.get(columns)
        program.check_reads(take(origin, columns))


def some_rows(program: Program, num_rows: int) -> Any:
    start, end = sorted(program.random.randint(0, num_rows) for _ in range(2))
    picked = [program.random.randrange(num_rows) for _ in range(program.random.randint(0, 5))] if num_rows else []
    return program.random.choice([None, slice(start, end), np.array(picked, dtype=np.int64)])


def sent(future: DataProtoFuture, handles: list[Logged]) -> DataProtoFuture:
    """Return the future as another process receives it: pickled, with numbers in place of the handles."""
    numbered = future.with_handles(lambda handle: handle.number if isinstance(handle, Logged) else handle)
    arrived = pickle.loads(pickle.dumps(numbered))
    return arrived.with_handles(lambda handle: handles[handle] if isinstance(handle, int) else handle)


@pytest.mark.parametrize("seed", SEEDS)
def test_narrowed_future_is_equal_after_it_was_sent(seed):
    program = Program(seed)
    future, batch, origin = program.result.future, program.result.batch, program.result.origin
    whole = future.narrow()
    for narrowed in (whole, sent(whole, program.handles)):
        assert_same(narrowed.get(), batch, has_all_meta_info=program.num_bases == 1)
    for handle in program.handles:
        handle.log.clear()
    rows, columns = some_rows(program, len(batch)), program.some(names_of(batch))
    narrow = future.narrow(tuple(columns), rows)
    expected = take(batch, columns, rows)
    for narrowed in (narrow, sent(narrow, program.handles)):
        assert_same(narrowed.get(columns), expected, has_all_meta_info=False)
        program.check_reads(take(origin, columns, rows))
    for_rows = future.narrow(None, rows)
    for narrowed in (for_rows, sent(for_rows, program.handles)):
        assert_same(narrowed.get(), take(batch, None, rows), has_all_meta_info=program.num_bases == 1)


def held_by(future: DataProtoFuture) -> set[int]:
    """Return the handles that hold rows of a narrowed future."""
    handles = future.handles() if len(future) else ()
    return {handle.number for handle in handles if isinstance(handle, Logged) and len(handle.contents)}


@pytest.mark.parametrize("seed", SEEDS)
def test_narrowed_future_holds_no_unused_handle(seed):
    program = Program(seed)
    future, origin = program.result.future, program.result.origin
    rows, columns = some_rows(program, len(origin)), program.some(names_of(origin))
    held = held_by(future.narrow(tuple(columns), rows))
    assert held <= set(program.needed(take(origin, columns, rows)))


# Expected reads, written by hand


def test_slice_reads_only_the_handles_of_its_rows():
    future = future_of(xy(1, 2), xy(3, 4), xy(5, 6))
    assert future.slice(1, 4).get("x").batch["x"].tolist() == [2, 3, 4]
    first, second, third = future.futures
    assert first.log == [(("x",), slice(1, 2))]
    assert second.log == [(("x",), None)]
    assert third.log == []


def test_a_reorder_reads_each_handle_once():
    future = future_of(xy(1, 2), xy(3, 4))
    assert future.reorder([3, 0, 2, 1]).rename("y", "z").get("z").batch["z"].tolist() == [-4, -1, -3, -2]
    rows = [[row.tolist() for _, row in handle.log] for handle in future.futures]
    assert rows == [[[0, 1]], [[1, 0]]]
    assert [columns for columns, _ in log_of(future)] == [("y",), ("y",)]


def test_padded_copies_are_read_from_the_original_rows_and_marked():
    numbered = DataProto.from_dict({"row_ids": torch.tensor([7, 8]), "x": torch.tensor([1, 2])})
    future = future_of(numbered, numbered).slice(0, 3).pad_to_divisor(5)
    assert future.get().batch["row_ids"].tolist() == [7, 8, 7, -1, -1]
    assert future.get().batch["x"].tolist() == [1, 2, 1, 1, 2]
    assert future.slice(4, 5).get().batch["row_ids"].tolist() == [-1]
    assert future.slice(0, 3).get().batch["row_ids"].tolist() == [7, 8, 7]
    assert numbered.batch["row_ids"].tolist() == [7, 8]


def test_padding_repeats_the_rows_if_fewer_than_the_divisor():
    future = future_of(xy(1, 2)).pad_to_divisor(5)
    assert future.get("x").batch["x"].tolist() == [1, 2, 1, 2, 1]
    assert len(future) == 5
    assert future_of(xy(1, 2)).pad_to_divisor(2).get("x").batch["x"].tolist() == [1, 2]
    assert len(future_of(DataProto.from_dict({"x": torch.zeros(0)})).pad_to_divisor(4)) == 0


def test_union_of_columns_from_the_same_shards_keeps_one():
    future = future_of(xy(1, 2), xy(3))
    joined = future.select_columns(["x"]).union(future).union(future.rename("y", "z"))
    assert joined.columns == ("x", "y", "z")
    assert joined.get().batch["z"].tolist() == joined.get().batch["y"].tolist() == [-1, -2, -3]
    sliced = future.slice(1).union(future.slice(1))
    assert sliced.get("x").batch["x"].tolist() == [2, 3]


def test_equal_rows_by_other_operations_are_the_same_column():
    future = future_of(xy(1, 2), xy(3, 4))
    for other in (
        future.pad_to_divisor(3).slice(0, 4),
        DataProtoFuture.concat([future.slice(0, 2), future.slice(2, 4)]),
        future.reorder([3, 2, 1, 0]).reorder([3, 2, 1, 0]),
        future.with_meta_info({"step": 1}),
    ):
        assert future.union(other).get().batch["x"].tolist() == [1, 2, 3, 4]


def test_union_of_other_shards_raises_before_reading():
    future = future_of(xy(1, 2), xy(3, 4))
    others = (
        future_of(xy(1, 2), xy(3, 4)),
        future.reorder([3, 2, 1, 0]),
        future.rename(["x", "y"], ["y", "x"]),
        future.pad_to_divisor(3).slice(1, 5),
        DataProtoFuture.concat([future.slice(2, 4), future.slice(0, 2)]),
        xy(1, 2, 3, 4),
    )
    for other in others:
        with pytest.raises(FieldError, match=r"union: both futures have \['x', 'y'\]; select or rename first"):
            future.union(other)
    assert log_of(future) == []


def test_unknown_columns_raise_before_reading():
    future = future_of(xy(1, 2), xy(3, 4))
    for part in (future, future.slice(0, 3), future.union(future_of(DataProto.from_dict({"z": torch.zeros(4)})))):
        for attempt in (
            lambda part: part.get("w"),
            lambda part: part.get(["x", "w"]),
            lambda part: part.select(["w"]),
            lambda part: part.select_columns(["x", "w"]),
            lambda part: part.rename("w", "v"),
            lambda part: part.rename("x", "z").get("x"),
        ):
            with pytest.raises(FieldError, match=r"has no '[wx]'; it has|already has one of the new names"):
                attempt(part)
    with pytest.raises(FieldError, match="2 old names and 1 different new names"):
        future.rename(["x", "y"], "z")
    assert log_of(future) == []


def test_operation_on_a_result_without_a_table_names_the_fix():
    undeclared = DataProtoFuture(DataProto.concat, [Logged(0, xy(1, 2)), Logged(1, xy(3, 4))])
    for attempt in (
        lambda: undeclared.slice(0, 1), lambda: undeclared.reorder([0]), lambda: undeclared.pad_to_divisor(2),
        lambda: undeclared.select(["x"]), lambda: undeclared.select_columns("x"), lambda: undeclared.rename("x", "z"),
        lambda: undeclared.union(xy(1, 2, 3, 4)), lambda: future_of(xy(1, 2)).union(undeclared),
        lambda: undeclared.repeat(2), lambda: undeclared.pop("x"), lambda: undeclared.with_meta_info({"k": 1}),
        lambda: undeclared.chunk(4), lambda: undeclared.narrow(("x",)), lambda: undeclared.select_rows(np.array([0])),
    ):  # fmt: skip
        with pytest.raises(BatchError, match=r"known before it is read; declare writes=.* future.get\(\)"):
            attempt()
    assert log_of(undeclared) == []


def test_results_without_a_table_are_chunked_by_whole_shards():
    first, second = (DataProtoFuture(DataProto.concat, [Logged(n, xy(n)), Logged(n, xy(n, n))]) for n in (1, 2))
    both = DataProtoFuture.concat([first, second, Logged(3, xy(3))])
    assert both.get("x").batch["x"].tolist() == [1, 1, 1, 2, 2, 2, 3]
    with pytest.raises(BatchError, match=r"chunk\(2\) of 5 shards"):
        both.chunk(2)
    halves = DataProtoFuture.concat([first, second]).chunk(2)
    assert [half.get().batch["x"].tolist() for half in halves] == [[1, 1, 1], [2, 2, 2]]
    with pytest.raises(BatchError, match="some futures declare their columns and others do not"):
        DataProtoFuture.concat([first, future_of(xy(1))])


def test_select_of_one_kind_uses_the_glossary_for_the_other():
    known = DataProto.from_dict({"scores": torch.zeros(2), "row_ids": torch.arange(2)}, {"finish_reasons": ["a", "b"]})
    future = future_of(known)
    assert future.select(["scores"]).columns == ("scores", "finish_reasons")
    assert future.select(None, ["finish_reasons"]).columns == ("finish_reasons", "scores", "row_ids")
    assert future.select(["scores"], ()).columns == ("scores",)
    with pytest.raises(FieldError, match="whether 'y' is a tensor is not known before the future is read; pass"):
        future_of(xy(1, 2)).select(["x"])


def test_concat_reads_a_renamed_column_by_its_stored_name():
    first, second = future_of(xy(1, 2)), future_of(xy(3)).rename(["x", "y"], ["y", "x"])
    both = DataProtoFuture.concat([first, second])
    assert both.get("x").batch["x"].tolist() == [1, 2, -3]
    assert both.rename("y", "z").slice(1).get().batch["z"].tolist() == [-2, 3]
    assert [columns for columns, _ in log_of(both)] == [("x",), ("x", "y"), ("y",), ("y", "x")]
    assert [columns for _, columns in both.narrow(("x",)).sources()] == [("x",), ("y",)]
    with pytest.raises(FieldError, match=r"concat: one future has \('x', 'y'\), another has \('x',\); select the same"):
        DataProtoFuture.concat([first, first.select_columns("x")])


def test_wrong_numbers_of_rows_are_errors():
    future = future_of(xy(1, 2), xy(3, 4))
    with pytest.raises(BatchError, match="this future has 4 rows, the other has 3"):
        future.union(DataProto.from_dict({"z": torch.zeros(3)}))
    with pytest.raises(BatchError, match=r"slice\('a', None\): slice indices must be integers"):
        future.slice("a")  # pyright: ignore
    with pytest.raises(BatchError, match="each of the 4 rows exactly once"):
        future.reorder([0, 1, 2])
    with pytest.raises(BatchError, match="row 4 is not in a batch of 4 rows"):
        future.reorder([0, 1, 2, 4])
    for attempt in (lambda: future.chunk(0), lambda: future.repeat(-1), lambda: future.pad_to_divisor(0)):
        with pytest.raises(BatchError, match="must be at least"):
            attempt()
    handles = [Logged(0, xy(1, 2)), Logged(1, xy(3))]
    wrong = DataProtoFuture(DataProto.concat, handles, num_rows=4, columns=("x", "y"), part_rows=[2, 2])
    with pytest.raises(BatchError, match="the future declares 4 rows, but part 1 has 1"):
        wrong.get()
    with pytest.raises(BatchError, match="the future declares 1 rows, but has 0"):
        wrong.slice(3).get()


def test_writing_to_a_read_batch_does_not_change_the_future():
    future = future_of(xy(1, 2), xy(3, 4))
    future.get().batch["x"].zero_()
    assert future.get().batch["x"].tolist() == [1, 2, 3, 4]


# Regressions


def test_a_concat_of_selected_futures_can_be_sent_for_one_column():
    parts = [future_of(xy(1, 2)).select_columns(["x", "y"]), future_of(xy(3)).select_columns(["x", "y"])]
    future = DataProtoFuture.concat(parts).select_columns(["x"])
    assert future.get().batch["x"].tolist() == [1, 2, 3]
    assert future.narrow().get().batch["x"].tolist() == [1, 2, 3]


def test_narrow_after_select_columns_keeps_the_fewer_columns():
    narrowed = future_of(xy(1, 2)).select_columns(["x", "y"]).narrow(("x",))
    assert list(narrowed.get().batch.keys()) == ["x"]


def test_narrow_after_select_keeps_the_fewer_columns():
    narrowed = future_of(xy(1, 2)).select(["x", "y"]).narrow(("x",))
    assert list(narrowed.get().batch.keys()) == ["x"]


def test_a_padded_future_can_be_narrowed_twice():
    numbered = DataProto.from_dict({"row_ids": torch.tensor([0, 1, 2])})
    future = future_of(numbered).pad_to_divisor(4).narrow()
    assert future.narrow(None, slice(2, 4)).get().batch["row_ids"].tolist() == [2, -1]


def test_narrowed_future_has_the_length_of_its_rows():
    assert len(future_of(xy(1, 2)).narrow(None, slice(0, 1))) == 1


def test_narrow_accepts_an_open_slice():
    assert future_of(xy(1, 2)).narrow(None, slice(None, 1)).get("x").batch["x"].tolist() == [1]


def test_meta_info_of_a_remote_part_is_read_with_its_columns():
    other = DataProto.from_dict({"z": torch.zeros(2)}, meta_info={"temperature": 0.5})
    both = future_of(xy(1, 2)).union(future_of(other))
    assert both.select_columns("x").get().meta_info == {}
    assert both.get(["x", "z"]).meta_info == {"temperature": 0.5}
    assert future_of(xy(1, 2)).union(other).select_columns("x").get().meta_info == {"temperature": 0.5}  # local


def test_rows_of_a_future_have_the_meta_info_of_their_parts():
    parts = [xy(1, 2, meta_info={"metrics": {"loss": 1.0}}), xy(3, 4, meta_info={"metrics": {"loss": 2.0}})]
    assert future_of(*parts).slice(0, 2).get().meta_info == {"metrics": {"loss": [1.0]}}
    assert future_of(*parts).slice(1, 3).get().meta_info == {"metrics": {"loss": [1.0, 2.0]}}


def test_get_of_a_local_batch_returns_its_contents():
    batch = xy(1, 2, meta_info={"metrics": {"loss": 1.0}})
    assert DataProtoFuture.of(batch).get().meta_info == {"metrics": {"loss": 1.0}}


def test_union_with_a_batch_that_has_only_meta_info_on_futures():
    extra = DataProto(meta_info={"step": 1})
    assert xy(1, 2).union(extra).meta_info == {"step": 1}
    assert future_of(xy(1, 2)).union(extra).get().meta_info == {"step": 1}


def test_reading_no_columns_of_repeated_objects():
    future = future_of(DataProto.from_dict(non_tensors={"texts": ["a", "b"]}, meta_info={"k": 1}))
    assert future.repeat(2).get([]).meta_info == {"k": 1}


def test_with_meta_info_replaces_keys_of_the_shards():
    future = future_of(xy(1, 2, meta_info={"step": 1, "seed": 2})).with_meta_info({"step": 5})
    assert future.get().meta_info == {"step": 5, "seed": 2}
    assert future.slice(0, 1).get("x").meta_info == {"step": 5, "seed": 2}
    assert future.select(meta_info_keys=["step"]).get().meta_info == {"step": 5}
    assert future.select(meta_info_keys=["seed"]).select(meta_info_keys=["step"]).get().meta_info == {}
    with pytest.raises(BatchError, match="union: 'step' is 5 in one batch and 6 in another"):
        future.union(DataProto(meta_info={"step": 6}))


def test_concat_keeps_each_parts_selection_of_meta_info():
    def of(**meta_info):
        return future_of(xy(1, 2, meta_info=meta_info))

    parts = [of(a=1, b=2, c=3).select(meta_info_keys=[key]) for key in ("a", "b")]
    assert DataProtoFuture.concat(parts).get().meta_info == {"a": 1, "b": 2}
    assert DataProtoFuture.concat([of(k=0).select(meta_info_keys=[]), of(k=5)]).get().meta_info == {"k": 5}
    replaced = [of(k=0).with_meta_info({"k": 1}), of(k=0).with_meta_info({"k": 1, "j": 2})]
    assert DataProtoFuture.concat(replaced).get().meta_info == {"k": 1, "j": 2}


def test_futures_do_not_share_local_meta_info():
    future = future_of(xy(1, 2)).with_meta_info({"step": [1]})
    future.slice(0, 1).meta_info["step"].append(2)
    future.rename("x", "z").meta_info["new"] = 1
    assert future.meta_info == {"step": [1]}


def test_concat_of_local_batches_pads_with_their_pad_token():
    short, long = (
        DataProto.from_dict({"responses": torch.ones(1, n, dtype=torch.int64)}, meta_info={"pad_token_id": 7})
        for n in (1, 3)
    )
    joined = DataProtoFuture.concat([DataProtoFuture.of(short), DataProtoFuture.of(long)])
    assert joined.get().batch["responses"].tolist() == [[1, 7, 7], [1, 1, 1]]


def test_column_under_two_names_can_be_concatenated_and_sent():
    future = future_of(xy(1, 2, meta_info={"o": object()}))
    doubled = future.union(future.rename("x", "z"))
    assert doubled.get(["x", "z"]).batch["z"].tolist() == [1, 2]
    other = future_of(DataProto.from_dict({name: torch.tensor([5]) for name in "xyz"}))
    both = DataProtoFuture.concat([doubled, other])
    assert both.get().batch["z"].tolist() == [1, 2, 5]
    assert [columns for _, columns in both.narrow(("x", "z")).sources()] == [("x", "x"), ("x", "z")]


@pytest.mark.parametrize("is_held", [True, False])
def test_concat_of_renamed_futures_can_be_sent(is_held):
    first, second, third = (DataProto.from_dict({name: torch.arange(2) + start}) for start, name in enumerate("pqr"))
    p, q, r = map(DataProtoFuture.of if is_held else future_of, (first, second, third))
    inner = DataProtoFuture.concat([p.rename("p", "q"), q])
    future = DataProtoFuture.concat([inner.rename("q", "x"), r.rename("r", "x")]).slice(1, 5).narrow()
    handles: dict[int, Any] = dict(enumerate(future.handles()))
    for number, handle in handles.items():
        handle.number = number
    arrived = sent(future, handles)
    assert arrived.get().batch["x"].tolist() == [1, 1, 2, 2]


def test_pop_removes_columns_from_the_future():
    future = future_of(xy(1, 2, meta_info={"of": "shards"})).with_meta_info({"step": 1, "seed": 2})
    popped = future.pop(["x"], meta_info_keys=["step"])
    assert (popped.columns, popped.get().meta_info) == (("x",), {"step": 1})
    assert (future.columns, future.get().meta_info) == (("y",), {"of": "shards", "seed": 2})
    with pytest.raises(FieldError, match="has no 'x'; it has 'y'"):
        future.pop("x")


def test_repr_shows_rows_and_columns():
    future = DataProtoFuture.of(DataProto.from_dict({"x": torch.zeros(3)}))
    assert repr(future.repeat(2)) == "DataProtoFuture of 6 rows: x"
    assert repr(DataProtoFuture(list, [])) == ("DataProtoFuture of an unknown number of rows: undeclared columns")
