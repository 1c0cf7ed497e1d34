"""Random sequences of operations on a batch, on a future and on a plain list of rows have equal results.

A future reads only the handles, columns and rows that are needed, also after it was narrowed and sent.
"""

import copy
import pickle
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto
from hybridflow.protocol.handle import HeldBatch, names_of, take
from hybridflow.protocol.packed_batch import PackedBatch


class Logged(HeldBatch):
    """A handle that logs the columns and rows of each read (None: all)."""

    def __init__(self, number: int, contents: DataProto, is_packed: bool):
        super().__init__(contents)
        self.number, self.contents, self.log = number, contents, []
        self.packed = PackedBatch.pack(contents, pickle.dumps) if is_packed else None

    def get(self):
        return self.read(None, None)

    def read(self, columns, rows, *, shared=False):
        self.log.append((columns, rows))
        return take(self.contents, columns, rows) if self.packed is None else self.packed.read(columns, rows, shared)


class Cell(NamedTuple):
    """One value: `origin` is (base * 10 + column) * 1000 + row; a marked one is in a padding copy of `row_ids`."""

    origin: int
    is_marked: bool = False

    def value(self) -> Any:
        number, kind = self.origin, self.origin // 1000 % 10
        marked = (-1, [-1.0, -1.0], -1, -1, "-1")
        return marked[kind] if self.is_marked else (number, [number] * 2, number, {"cell": number}, str(number))[kind]


KINDS = (torch.int64, torch.float64, torch.int64, "O", "U")
"""The dtype, or its kind, of each column of a base."""


@dataclass
class Found:
    """A future and a batch, and the equal rows; `kinds` are the numbers of the columns' dtypes in KINDS."""

    future: DataProtoFuture
    batch: DataProto
    rows: list[dict[str, Cell]]
    kinds: dict[str, int]

    def chosen(self, future: DataProtoFuture, batch: DataProto, rows: Any) -> "Found":
        """Return the result of choosing rows, by number."""
        return Found(future, batch, [self.rows[row] for row in rows], self.kinds)

    def with_columns(self, future: DataProtoFuture, batch: DataProto, names: dict[str, str]) -> "Found":
        """Return the result of keeping the columns `names`, old to new."""
        rows = [{new: row[old] for old, new in names.items()} for row in self.rows]
        return Found(future, batch, rows, {new: self.kinds[old] for old, new in names.items()})

    def joined(self, future: DataProtoFuture, batch: DataProto, other: "Found") -> "Found":
        rows = [mine | theirs for mine, theirs in zip(self.rows, other.rows, strict=True)]
        return Found(future, batch, rows, self.kinds | other.kinds)


class Program:
    """Up to eight random operations."""

    def __init__(self, rng: Any):
        self.random = rng
        self.handles: list[Logged] = []
        self.place_of: list[tuple[int, int]] = []  # per handle: its base and its first row in it
        self.num_bases, self.num_names = 0, 0
        self.is_packed = rng.random() < 0.5
        self.result = self.new_base([rng.randint(0, 4) for _ in range(rng.randint(1, 4))], has_row_ids=True)
        for _ in range(rng.randint(1, 8)):
            step = rng.choice([name for name in dir(self) if name.startswith("do_")])
            self.result = getattr(self, step)(self.result)

    def new_base(self, part_rows: list[int], has_row_ids: bool = False) -> Found:
        base, total = self.num_bases, sum(part_rows)
        self.num_bases += 1
        names = (f"t{base}", f"wide{base}", "row_ids" if has_row_ids else f"ids{base}", f"object{base}", f"text{base}")
        rows = [{name: Cell((base * 10 + i) * 1000 + row) for i, name in enumerate(names)} for row in range(total)]
        columns = [[row[name].value() for row in rows] for name in names]
        tensors = [torch.tensor(column, dtype=dtype) for column, dtype in zip(columns, KINDS[:3], strict=False)]
        tensors[1] = tensors[1].reshape(total, 2)
        whole = DataProto.from_dict(
            dict(zip(names, tensors, strict=False)),
            {names[3]: columns[3], names[4]: np.array(columns[4]).astype("U6")},
            {f"of base {base}": [base]},
        )
        handles, start = [], 0
        for count in part_rows:
            handles.append(Logged(len(self.handles), whole.slice(start, start + count), self.is_packed))
            self.handles.append(handles[-1])
            self.place_of.append((base, start))
            start += count
        future = DataProtoFuture(DataProto.concat, handles, None, total, names, part_rows)
        return Found(future, whole, rows, {name: i for i, name in enumerate(names)})

    def some(self, names: Any) -> list[str]:
        names = list(names)
        return self.random.sample(names, self.random.randint(1, len(names))) if names else []

    def some_of_each_kind(self, found: Found) -> tuple[list[str], list[str]]:
        kinds = found.kinds.items()
        return self.some(name for name, kind in kinds if kind < 3), self.some(name for name, kind in kinds if kind > 2)

    # Rows

    def do_slice(self, found: Found) -> Found:
        num_rows = len(found.rows)
        start, end = (self.random.choice([None, *range(-3, num_rows + 2)]) for _ in range(2))
        step = self.random.choice([None, None, 2, -1])
        if step is None:
            return found.chosen(found.future.slice(start, end), found.batch[start:end], range(num_rows)[start:end])
        rows = np.arange(num_rows)[start:end:step]
        return found.chosen(found.future.select_rows(rows), found.batch[start:end:step], rows)

    def do_chunk(self, found: Found) -> Found:
        num_rows = len(found.rows)
        chunks = self.random.choice([n for n in (1, 2, 3, 4) if num_rows % n == 0])
        index, size = self.random.randrange(chunks), num_rows // chunks
        batches = found.batch.chunk(chunks) if self.random.random() < 0.5 or not size else found.batch.split(size)
        rows = range(num_rows)[index * size : (index + 1) * size]
        return found.chosen(found.future.chunk(chunks)[index], batches[index], rows)

    def do_repeat(self, found: Found) -> Found:
        rows, interleave = list(range(len(found.rows))), self.random.random() < 0.5
        if len(rows) > 15:
            return found
        if self.random.random() < 0.3:
            times = [self.random.randint(0, 2) for _ in rows]
            repeated = np.repeat(rows, times).astype(np.int64)
            return found.chosen(found.future.select_rows(repeated), found.batch.sample_level_repeat(times), repeated)
        times = self.random.randint(0 if self.random.random() < 0.1 else 1, 3)
        repeated = [row for row in rows for _ in range(times)] if interleave else rows * times
        return found.chosen(
            found.future.select_rows(np.array(repeated, np.int64)), found.batch.repeat(times, interleave), repeated
        )

    def do_reorder(self, found: Found) -> Found:
        order = self.random.sample(range(len(found.rows)), len(found.rows))
        rows = np.array(order, np.int64)
        return found.chosen(found.future.select_rows(rows), found.batch.reorder(torch.tensor(order).long()), order)

    def do_select_rows(self, found: Found) -> Found:
        num_rows = len(found.rows)
        rows = (
            [self.random.randrange(-num_rows, num_rows) for _ in range(self.random.randint(0, 6))] if num_rows else []
        )
        index = self.random.choice([rows, tuple(rows), np.array(rows, np.int64), torch.tensor(rows).int()])
        if self.random.random() < 0.3:
            index = [self.random.random() < 0.6 for _ in range(num_rows)]
            rows = [row for row, is_kept in enumerate(index) if is_kept]
        return found.chosen(found.future.select_rows(np.array(rows, np.int64)), found.batch[index], rows)

    def do_concat(self, found: Found) -> Found:
        if len(found.rows) > 15:
            return found
        parts = [self.do_slice(found), found, self.do_slice(found)]
        future = DataProtoFuture.concat([part.future for part in parts])
        batch = DataProto.concat(part.batch for part in parts)
        return Found(future, batch, [row for part in parts for row in part.rows], found.kinds)

    def do_pad(self, found: Found) -> Found:
        divisor, num_rows = self.random.randint(1, 5), len(found.rows)
        batch, pad_size = pad_dataproto_to_divisor(found.batch, divisor)
        assert rows_of(unpad_dataproto(batch, pad_size)) == rows_of(found.batch)
        copies = [found.rows[index % num_rows] for index in range(-num_rows % divisor)] if num_rows else []
        marked = [
            {name: Cell(cell.origin, cell.is_marked or name == "row_ids") for name, cell in row.items()}
            for row in copies
        ]
        return Found(found.future.pad_to_divisor(divisor), batch, [*found.rows, *marked], found.kinds)

    # Columns

    def do_rename(self, found: Found) -> Found:
        old = self.some(found.kinds)
        new = self.random.sample(old, len(old))
        if self.random.random() < 0.5:
            new = [f"name{self.num_names + index}" for index in range(len(old))]
            self.num_names += len(old)
        names = {name: name for name in found.kinds} | dict(zip(old, new, strict=True))
        return found.with_columns(found.future.rename(old, new), found.batch.rename(old, new), names)

    def do_select(self, found: Found) -> Found:
        tensors, arrays = self.some_of_each_kind(found)
        names = {name: name for name in (*tensors, *arrays)}
        return found.with_columns(found.future.select_columns(names), found.batch.select(tensors, arrays), names)

    def do_pop(self, found: Found) -> Found:
        tensors, arrays = self.some_of_each_kind(found)
        batch, popped = found.batch.select(), {name: name for name in (*tensors, *arrays)}
        popped_batch = batch.pop(tensors, arrays, list(batch.meta_info))
        batch.meta_info |= popped_batch.meta_info
        rest = {name: name for name in found.kinds if name not in popped}
        if rest and (self.random.random() < 0.5 or not tensors):
            return found.with_columns(found.future.select_columns(rest), batch, rest)
        return found.with_columns(found.future.select_columns(popped), popped_batch, popped) if tensors else found

    def do_union(self, found: Found) -> Found:
        cuts = sorted(self.random.randint(0, len(found.rows)) for _ in range(self.random.randint(0, 3)))
        edges = [0, *cuts, len(found.rows)]
        other = self.new_base([end - start for start, end in pairwise(edges)])
        if self.random.random() < 0.5:
            other = self.do_rename(self.do_reorder(other))
        if self.random.random() < 0.3:
            found, other = other, found
        is_here = self.random.random() < 0.3 and "row_ids" not in other.kinds
        right = other.batch if is_here else other.future
        return found.joined(found.future.union(right), found.batch.union(other.batch), other)

    def do_union_of_the_same_origin(self, found: Found) -> Found:
        chosen = self.some(found.kinds)
        batch = found.batch.union(take(found.batch, tuple(chosen)))
        return found.joined(found.future.union(found.future.select_columns(chosen)), batch, found)

    # Storage

    def do_store(self, found: Found) -> Found:
        """Send the batch through a store, and the future to another process."""
        batch = found.batch
        with TemporaryDirectory() as folder:
            path = Path(folder) / "batch"
            batch.save_to_disk(path)
            stored = [DataProto.load_from_disk(path), pickle.loads(pickle.dumps(batch, self.random.randrange(6)))]
        stored += [copy.deepcopy(batch), copy.copy(batch), batch.to("cpu")]
        stored += [DataProto.from_tensordict(batch.to_tensordict())] if found.rows else []
        assert all(rows_of(each) == rows_of(batch) and each.meta_info == batch.meta_info for each in stored)
        return Found(sent(found.future, self.handles), self.random.choice(stored), found.rows, found.kinds)

    # Reads

    def needed(self, rows: list[dict[str, Cell]]) -> dict[int, tuple[set[int], set[int]]]:
        """Return the columns (by number) and rows of these cells for each handle that holds some of them."""
        needed: dict[int, tuple[set[int], set[int]]] = {}
        for cell in {cell.origin for row in rows for cell in row.values()}:
            for number, (base, start) in enumerate(self.place_of):
                row = cell % 1000 - start
                if cell // 10_000 == base and 0 <= row < len(self.handles[number].contents):
                    columns, of_handle = needed.setdefault(number, (set(), set()))
                    columns.add(cell // 1000 % 10)
                    of_handle.add(row)
        return needed

    def check_reads(self, rows: list[dict[str, Cell]]) -> None:
        """Assert that the reads since the last check returned only what these cells need, or no rows."""
        needed = self.needed(rows)
        for number, handle in enumerate(self.handles):
            of_columns = {name: index for index, name in enumerate(names_of(handle.contents))}
            for columns, read in handle.log:
                read_rows = set(np.arange(len(handle.contents))[slice(None) if read is None else read].tolist())
                if read_rows and columns != ():
                    columns_needed, rows_needed = needed.get(number, (set(), set()))
                    assert {of_columns[name] for name in (of_columns if columns is None else columns)} <= columns_needed
                    assert read_rows <= rows_needed
            handle.log.clear()


def sent(future: DataProtoFuture, handles: list[Logged]) -> DataProtoFuture:
    """Return the future as another process receives it: pickled, with numbers in place of the handles."""
    numbered = future.with_handles(lambda handle: handle.number if isinstance(handle, Logged) else handle)
    arrived = pickle.loads(pickle.dumps(numbered))
    return arrived.with_handles(lambda handle: handles[handle] if isinstance(handle, int) else handle)


def part_of(future: DataProtoFuture, columns: Any, rows: slice | np.ndarray | None) -> DataProtoFuture:
    future = future.select_columns(columns)
    if isinstance(rows, slice):
        return future.slice(rows.start, rows.stop)
    return future if rows is None else future.select_rows(rows)


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    columns = dict(batch.non_tensor_batch)
    columns |= {} if batch.batch is None else dict(batch.batch.items())
    lists = {name: column.tolist() for name, column in columns.items()}
    return [{name: column[row] for name, column in lists.items()} for row in range(len(batch))]


def assert_rows(found: DataProto, rows: list[dict[str, Cell]], kinds: dict[str, int]) -> None:
    assert rows_of(found) == [{name: cell.value() for name, cell in row.items()} for row in rows]
    dtypes = {name: column.dtype.kind for name, column in found.non_tensor_batch.items()}
    dtypes |= {} if found.batch is None else {name: column.dtype for name, column in found.batch.items()}
    assert dtypes == {name: KINDS[kind] for name, kind in kinds.items()}


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.randoms(use_true_random=True))
def test_operations_on_futures_and_batches_equal_those_on_rows(rng):
    program = Program(rng)
    future, batch, rows, kinds = (getattr(program.result, name) for name in ("future", "batch", "rows", "kinds"))
    assert [handle.log for handle in program.handles] == [[]] * len(program.handles)
    assert_rows(batch, rows, kinds)
    assert len(future) == len(batch) == len(rows)
    assert set(future.columns) == set(kinds)

    def check(read: DataProto, names: Any = kinds, index: Any = None) -> None:
        chosen = rows if index is None else rows[index] if isinstance(index, slice) else [rows[i] for i in index]
        expected = [{name: row[name] for name in names} for row in chosen]
        assert_rows(read, expected, {name: kinds[name] for name in names})
        program.check_reads(expected)
        assert read.meta_info.items() <= batch.meta_info.items()
        if program.num_bases == 1 and names is kinds:
            assert read.meta_info == batch.meta_info

    columns = program.some(kinds)
    start, end = sorted(rng.randint(0, len(rows)) for _ in range(2))
    picked = [rng.randrange(len(rows)) for _ in range(rng.randint(0, 5))] if rows else []
    index = rng.choice([None, slice(start, end), np.array(picked, dtype=np.int64)])
    check(future.get())
    check(future.get(columns), columns)
    check(future.get(columns[:1]), columns[:1])
    narrow = part_of(future, columns, index).narrow()
    held = [handle.number for handle in narrow.handles() if isinstance(handle, Logged) and len(handle.contents)]
    chosen = rows if index is None else np.array(rows, dtype=object)[index].tolist()
    used = program.needed([{name: row[name] for name in columns} for row in chosen])
    assert not len(narrow) or set(held) <= set(used)
    for handle in program.handles:
        handle.log.clear()
    for narrowed in (narrow, sent(narrow, program.handles)):
        check(narrowed.get(columns), columns, index)
    narrow = part_of(future, kinds, index).narrow()
    for narrowed in (narrow, sent(narrow, program.handles)):
        check(narrowed.get(), kinds, index)
