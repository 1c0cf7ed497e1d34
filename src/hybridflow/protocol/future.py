"""`DataProtoFuture`: a batch that is elsewhere, or not there yet.

It is a table from column to the shards that hold it: handles, and an index of rows. Operations on columns change the
table, operations on rows the index; neither reads anything. `get` is the only way to contents. A result whose method
does not declare its columns has no table: it is read, passed on, or cut by whole shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridflow.errors import BatchError, DispatchError, FieldError
from hybridflow.protocol.consistency import Names, as_names, require_names
from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.fields import FIELDS
from hybridflow.protocol.handle import Columns, Handle, HeldBatch, Renamed, inner, names_of, take, wait_for
from hybridflow.protocol.meta_info import concat_meta_info, copy_structure, union_meta_info
from hybridflow.protocol.padding import mark_copies
from hybridflow.protocol.row_index import RowIndex, count_rows_of
from hybridflow.protocol.rows import as_count, row_indices
from hybridflow.protocol.shards import MetaKeys, Shards
from hybridflow.protocol.side_by_side import join_columns


class Place(NamedTuple):
    """Where a column is: the number of its shards, and its name there; where `copies` is True it holds `fill`."""

    shards: int
    name: str
    copies: np.ndarray | None = None
    fill: Any = None


Table = dict[str, Place]


class DataProtoFuture:
    """The batch that `collect_fn` makes of the handles' contents (then `dispatch_fn` of that, if given).

    `num_rows`, `columns` and `part_rows` (the rows of each handle's batch) are what is declared of it. Where all three
    are, and `collect_fn` is `DataProto.concat`, it is a table: every operation is lazy, and only what is needed is
    read. `has_whole_shards`: each handle holds a batch, and the result is their concatenation. `meta_info` is what is
    known of it here; what the handles' batches have comes with `get`. Operations return new futures; only `pop` changes
    this one.
    """

    def __init__(
        self,
        collect_fn: Callable[[list], Any],
        futures: Sequence[Any],
        dispatch_fn: Callable[[Any], Any] | None = None,
        num_rows: int | None = None,
        columns: Columns | None = None,
        part_rows: Sequence[int] | None = None,
        *,
        has_whole_shards: bool | None = None,
    ) -> None:
        is_concat = collect_fn is DataProto.concat and dispatch_fn is None
        self.collect_fn, self.dispatch_fn = collect_fn, dispatch_fn
        self.has_whole_shards = is_concat if has_whole_shards is None else has_whole_shards
        self.num_rows, self.meta_info = num_rows, {}
        self._handles, self._declared = list(futures), columns
        self._shards: list[Shards] = []
        self._table: Table | None = None
        self._names: list[Columns] | None = None
        self._contents: Any = None
        if columns is not None and part_rows is not None and is_concat:
            self._shards = [Shards.of(self._handles, part_rows)]
            self._table = {name: Place(0, name) for name in columns}

    @classmethod
    def _of(
        cls,
        shards: list[Shards],
        table: Table,
        num_rows: int,
        meta_info: dict[str, Any],
        names: list[Columns] | None = None,
    ) -> "DataProtoFuture":
        made = cls.__new__(cls)
        made.collect_fn, made.dispatch_fn, made.has_whole_shards = DataProto.concat, None, True
        made.num_rows, made.meta_info = num_rows, meta_info
        made._handles, made._declared, made._contents = [], None, None
        made._shards, made._table, made._names = shards, table, names
        return made

    @staticmethod
    def of(batch: "DataProto | DataProtoFuture") -> "DataProtoFuture":
        """Return a batch of this process as a future; a future as it is."""
        if isinstance(batch, DataProtoFuture):
            return batch
        held, rows = HeldBatch(batch.select(meta_info_keys=())), len(batch)
        table = {name: Place(0, name) for name in names_of(batch)}
        return DataProtoFuture._of([Shards.of([held], [rows])], table, rows, copy_structure(batch.meta_info))

    @property
    def columns(self) -> Columns | None:
        """The names of its columns; None where its method does not declare them."""
        return self._declared if self._table is None else tuple(self._table)

    @property
    def futures(self) -> list[Any]:
        """The handles that it reads."""
        return list(self.handles())

    @property
    def is_table(self) -> bool:
        """Whether columns and rows are known, so that every operation is lazy."""
        return self._table is not None

    def get(self, columns: Names = None) -> Any:
        """Wait, and return a new batch: all of it, or only the named columns (of either kind) with meta_info.

        What a method returned that is not a batch comes as `collect_fn` made it. Raises FieldError for a missing
        column, BatchError if the number of rows is not the declared one, and whatever the call raised.
        """
        wanted = None if columns is None else tuple(as_names(columns))
        if wanted is not None and self.columns is not None:
            require_names(wanted, self.columns, "the future")
        contents = self._read(wanted) if self.is_table else self._collected(wanted)
        if not isinstance(contents, DataProto):
            return contents
        if self.num_rows is not None and len(contents) != self.num_rows and names_of(contents):
            raise BatchError(f"the future declared {self.num_rows} rows, but has {len(contents)}.")
        return contents

    def __len__(self) -> int:
        if self.num_rows is None:
            raise BatchError("the number of rows is not known before the future is read; use len(future.get()).")
        return self.num_rows

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        rows = "as many rows as its call makes" if self.num_rows is None else f"{self.num_rows} rows"
        columns = "columns that are not declared" if self.columns is None else ", ".join(self.columns) or "no columns"
        return f"DataProtoFuture of {rows}: {columns}"

    # Rows

    @staticmethod
    def concat(data: "Sequence[Handle | DataProtoFuture]") -> "DataProtoFuture":
        """Return the rows of all parts, in order: of futures with the same columns, or of whole shards."""
        if not data:
            raise BatchError("concat needs at least one future, got an empty list.")
        parts = [part for part in data if isinstance(part, DataProtoFuture)]
        if len(parts) < len(data) or not all(part.is_table for part in parts):
            return _concat_shards(data)
        return _concat_tables(parts)

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Return `chunks` equal parts. Of a result without declared columns, parts of whole shards."""
        chunks = as_count(chunks, "chunks", 1)
        if self.is_table:
            size, rest = divmod(len(self), chunks)
            if rest:
                raise BatchError(f"{len(self)} rows do not make {chunks} equal parts; pad_to_divisor({chunks}) first.")
            self._names_in(0)  # found once for all parts
            return [self._choose(slice(index * size, (index + 1) * size), size) for index in range(chunks)]
        size, rest = divmod(len(self._handles), chunks)
        if rest or not self.has_whole_shards:
            self._require_table(f"chunk({chunks}) of {len(self._handles)} shards")
        return [_of_shards(self._handles[index * size : (index + 1) * size]) for index in range(chunks)]

    def slice(self, start: int | None = None, end: int | None = None) -> "DataProtoFuture":
        """Return rows `start:end`, as Python counts them."""
        self._require_table("slice")
        rows = range(len(self))[start:end]
        return self._choose(slice(rows.start, max(rows.start, rows.stop)), len(rows))

    def reorder(self, indices: Sequence[int] | np.ndarray) -> "DataProtoFuture":
        """Return the same rows in another order: an all-gather, as each part then needs rows of every shard.

        Raises BatchError unless `indices` names each row once.
        """
        self._require_table("reorder")
        rows = row_indices(indices, len(self))
        if len(rows) != len(self) or len(np.unique(rows)) != len(self):
            raise BatchError(f"reorder needs each of the {len(self)} rows exactly once, got {len(rows)} indices.")
        return self._choose(rows, len(rows))

    def select_rows(self, rows: np.ndarray) -> "DataProtoFuture":
        """Return some rows, by number, in any order and as often as they are named. Raises BatchError for a row that
        is not there."""
        self._require_table("select_rows")
        chosen = row_indices(rows, len(self))
        return self._choose(chosen, len(chosen))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProtoFuture":
        """As `DataProto.repeat`."""
        self._require_table("repeat")
        times, rows = as_count(repeat_times, "repeat_times", 0), np.arange(len(self))
        return self._choose(np.repeat(rows, times) if interleave else np.tile(rows, times), len(rows) * times)

    def pad_to_divisor(self, size_divisor: int) -> "DataProtoFuture":
        """As `pad_dataproto_to_divisor`: copies of the first rows at the end, marked as the glossary says."""
        self._require_table("pad_to_divisor")
        num_rows = len(self)
        padded = num_rows + -num_rows % as_count(size_divisor, "size_divisor", 1)
        if padded == num_rows or not num_rows:
            return self
        rows = np.arange(padded)
        future, is_copy = self._choose(rows % num_rows, padded), rows >= num_rows
        table = dict(future._places())
        for name, place in table.items():
            if name in FIELDS and (fill := FIELDS[name].duplicate_value) is not None:
                copies = is_copy if place.copies is None else is_copy | place.copies
                table[name] = place._replace(copies=copies, fill=fill)
        return DataProtoFuture._of(future._shards, table, padded, self.meta_info)

    # Columns

    def select(
        self, batch_keys: Names = None, non_tensor_batch_keys: Names = None, meta_info_keys: Names = None
    ) -> "DataProtoFuture":
        """As `DataProto.select`. Naming one kind keeps all of the other kind, as the glossary knows it; raises
        FieldError for a column that it does not know."""
        self._require_table("select")
        chosen = [*as_names(batch_keys), *as_names(non_tensor_batch_keys)]
        require_names(chosen, self._places(), "select: the future")
        future = self
        if batch_keys is not None or non_tensor_batch_keys is not None:
            others = [name for name in self._places() if name not in chosen]
            if batch_keys is None or non_tensor_batch_keys is None:
                chosen += [name for name in others if _is_tensor(name) is (batch_keys is None)]
            future = self.select_columns(chosen)
        if meta_info_keys is None:
            return future
        kept = tuple(as_names(meta_info_keys))
        here = {key: self.meta_info[key] for key in kept if key in self.meta_info}
        elsewhere = tuple(key for key in kept if key not in here)
        shards = [shards.with_meta_keys(MetaKeys(elsewhere, shards.meta_keys.skipped)) for shards in future._shards]
        return DataProtoFuture._of(shards, future._places(), len(self), here)

    def select_columns(self, columns: Names) -> "DataProtoFuture":
        """Return the named columns, of either kind, and meta_info."""
        self._require_table("select_columns")
        chosen = as_names(columns)
        require_names(chosen, self._places(), "select: the future")
        return self._with_table({name: self._places()[name] for name in chosen})

    def pop(
        self, batch_keys: Names = None, non_tensor_batch_keys: Names = None, meta_info_keys: Names = None
    ) -> "DataProtoFuture":
        """Remove the named columns, and keys of `meta_info`, from this future, and return them as another one."""
        self._require_table("pop")
        chosen, keys = [*as_names(batch_keys), *as_names(non_tensor_batch_keys)], as_names(meta_info_keys)
        require_names(keys, self.meta_info, "pop: meta_info of the future")
        popped = self.select_columns(chosen).select(meta_info_keys=())
        popped.meta_info = {key: self.meta_info[key] for key in keys}
        self.meta_info = {key: value for key, value in self.meta_info.items() if key not in keys}
        self._table = {name: place for name, place in self._places().items() if name not in chosen}
        return popped

    def rename(self, old_keys: Names = None, new_keys: Names = None) -> "DataProtoFuture":
        """As `DataProto.rename`."""
        self._require_table("rename")
        old, new = as_names(old_keys), as_names(new_keys)
        if len(old) != len(new):
            raise FieldError(f"rename: {len(old)} old and {len(new)} different new names.")
        require_names(old, self._places(), "rename: the future")
        names = dict(zip(old, new, strict=True))
        table = {names.get(name, name): place for name, place in self._places().items()}
        if len(table) < len(self._places()):
            raise FieldError(f"rename {old} to {new}: the future already has one of them, it has {self.columns}.")
        return DataProtoFuture._of(self._shards, table, len(self), self.meta_info)

    def with_meta_info(self, more: Mapping[str, Any]) -> "DataProtoFuture":
        """Return the same columns, with more keys of meta_info, which replace those of the same name."""
        self._require_table("with_meta_info")
        shards = [s.with_meta_keys(MetaKeys(s.meta_keys.kept, s.meta_keys.skipped | set(more))) for s in self._shards]
        return DataProtoFuture._of(shards, self._places(), len(self), {**self.meta_info, **more})

    def union(self, other: "DataProtoFuture | DataProto") -> "DataProtoFuture":
        """As `DataProto.union`, of disjoint columns, or of columns that are the same rows of the same shards.

        Raises FieldError for any other column that both have, BatchError for different numbers of rows or values of
        one key of meta_info, and for a future that has no table.
        """
        self._require_table("union")
        if isinstance(other, DataProto) and not names_of(other):
            meta_info = union_meta_info(self.meta_info, other.meta_info)
            return DataProtoFuture._of(self._shards, self._places(), len(self), meta_info)
        other = DataProtoFuture.of(other)
        other._require_table("union")
        if len(self) != len(other):
            raise BatchError(f"union: this future has {len(self)} rows, the other has {len(other)}.")
        mine, theirs = self._places(), other._places()
        differing = sorted(name for name in mine if name in theirs and not self._is_same_column(name, other))
        if differing:
            raise FieldError(f"union: both futures have {differing}; select or rename first.")
        shards, number = list(self._shards), {}
        for index, of_other in enumerate(other._shards):
            number[index] = next((own for own, mine in enumerate(shards) if mine is of_other), len(shards))
            shards += [of_other] * (number[index] == len(shards))
        more = {n: place._replace(shards=number[place.shards]) for n, place in theirs.items() if n not in mine}
        meta_info = union_meta_info(self.meta_info, other.meta_info)
        return DataProtoFuture._of(shards, {**mine, **more}, len(self), meta_info)._with_table({**mine, **more})

    # Reading, and sending to a reader elsewhere

    def narrow(self, columns: Columns | None = None, rows: RowIndex = None) -> "DataProtoFuture":
        """Return no more than these columns and rows, with no handle that they do not need: what is sent to a reader
        elsewhere."""
        if self._table is None:
            if columns is not None or rows is not None:
                self._require_table("narrow")
            return self
        future = self if columns is None else self.select_columns(columns)
        if rows is not None:
            if isinstance(rows, slice):
                bounds = range(len(future))[rows]
                rows = slice(bounds.start, max(bounds.start, bounds.stop))
            future = future._choose(rows, count_rows_of(rows, len(future)))
        shards = [shards.narrow().without_excess(future._names_in(i)) for i, shards in enumerate(future._shards)]
        return DataProtoFuture._of(shards, future._places(), len(future), future.meta_info, future._names)

    def handles(self) -> Iterator[Handle]:
        """Iterate over the handles that it reads."""
        if self._table is None:
            yield from self._handles
        for shards in self._shards:
            yield from map(inner, shards.handles)

    def sources(self) -> Iterator[tuple[Handle, Columns]]:
        """Iterate over the handles, each with the names there of the columns that are read of it."""
        if self._table is None:
            yield from ((handle, self._declared or ()) for handle in self._handles)
        for number, shards in enumerate(self._shards):
            names = self._names_in(number)
            for handle in shards.handles:
                if isinstance(handle, Renamed):
                    yield handle.handle, tuple(handle.names.get(name, name) for name in names)
                else:
                    yield handle, names

    def with_handles(self, change: Callable[[Handle], Any]) -> "DataProtoFuture":
        """Return the same future with every handle exchanged for `change(handle)`."""
        if self._table is None:
            changed = [change(handle) for handle in self._handles]
            if self.has_whole_shards:
                return _of_shards(changed)
            return DataProtoFuture(self.collect_fn, changed, self.dispatch_fn, self.num_rows, self._declared)
        shards = [shards.with_handles(change) for shards in self._shards]
        return DataProtoFuture._of(shards, self._table, len(self), self.meta_info)

    def _read(self, columns: Columns | None) -> DataProto:
        """Read the table: the columns of each of its shards, side by side."""
        future = (self if columns is None else self.select_columns(columns)).narrow()
        wait_for(future.handles())
        table, parts = future._places(), []
        for number, shards in enumerate(future._shards):
            names = {name: place.name for name, place in table.items() if place.shards == number}
            parts.append(_renamed(shards.read(future._names_in(number)), names))
        if self.meta_info:
            parts.append(DataProto(meta_info=self.meta_info))
        batch = join_columns(parts)
        for shards in future._shards:
            require_names(shards.meta_keys.kept or (), batch.meta_info, "select: meta_info of the future")
        for name, place in table.items():
            if place.copies is not None and place.copies.any():
                mark_copies(batch, name, place.copies, place.fill)
        return batch

    def _collected(self, columns: Columns | None) -> Any:
        """Read a result without a table: all that the handles hold, once."""
        if self._contents is None:
            wait_for(self._handles)
            contents = self.collect_fn([handle.get() for handle in self._handles])
            self._contents = contents if self.dispatch_fn is None else self.dispatch_fn(contents)
        if isinstance(self._contents, DataProto):
            return take(self._contents, columns).select()
        if columns is not None:
            raise BatchError(f"the call returned a {type(self._contents).__name__}, which has no columns; use get().")
        return self._contents

    def _places(self) -> Table:
        assert self._table is not None
        return self._table

    def _names_in(self, number: int) -> Columns:
        """Return the columns of one of its shards, by their names there."""
        if self._names is None:
            names: list[dict[str, None]] = [{} for _ in self._shards]
            for place in self._places().values():
                names[place.shards][place.name] = None
            self._names = [tuple(of_shards) for of_shards in names]
        return self._names[number]

    def _require_table(self, what: str) -> None:
        if self._table is None:
            raise BatchError(
                f"{what} needs a result whose columns and number of rows are known before it is read; declare "
                f"writes=(...) in the @register of its method, or read it first: future.get()."
            )

    def _choose(self, rows: RowIndex, num_rows: int) -> "DataProtoFuture":
        table = self._places()
        if any(place.copies is not None for place in table.values()):
            table = {n: p if p.copies is None else p._replace(copies=p.copies[rows]) for n, p in table.items()}
        shards = [shards.choose(rows) for shards in self._shards]
        return DataProtoFuture._of(shards, table, num_rows, self.meta_info, self._names)

    def _with_table(self, table: Table) -> "DataProtoFuture":
        """Return other columns of the same rows, without the shards that hold none of them."""
        used = sorted({place.shards for place in table.values()})
        if not used or len(used) == len(self._shards):
            return DataProtoFuture._of(self._shards, table, len(self), self.meta_info)
        number = {old: new for new, old in enumerate(used)}
        moved = {name: place._replace(shards=number[place.shards]) for name, place in table.items()}
        return DataProtoFuture._of([self._shards[old] for old in used], moved, len(self), self.meta_info)

    def _is_same_column(self, name: str, other: "DataProtoFuture") -> bool:
        mine, theirs = self._places()[name], other._places()[name]
        return (
            mine.name == theirs.name
            and _copies_of(mine) == _copies_of(theirs)
            and self._shards[mine.shards].is_same(other._shards[theirs.shards])
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_contents": None}


def concat_results(results: Sequence[Any]) -> DataProto | None:
    """Return the rows of what each rank returned, in order; None if every rank returned None."""
    if all(result is None for result in results):
        return None
    for index, result in enumerate(results):
        if not isinstance(result, DataProto):
            raise DispatchError(
                f"output {index} of {len(results)} is {type(result).__name__}, but only DataProto can be concatenated; "
                f"use DP_COMPUTE_METRIC or DP_COMPUTE to get a list of the results."
            )
    return DataProto.concat(results)


def change_futures(value: Any, change: Callable[[DataProtoFuture], Any]) -> Any:
    """Return the value with every future, also in lists, tuples and dicts, exchanged for `change(future)`."""
    if isinstance(value, DataProtoFuture):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(change_futures(element, change) for element in value)
    if type(value) is dict:
        return {key: change_futures(element, change) for key, element in value.items()}
    return value


def _of_shards(handles: Sequence[Any]) -> DataProtoFuture:
    return DataProtoFuture(concat_results, handles, has_whole_shards=True)


def _concat_shards(parts: Sequence[Any]) -> DataProtoFuture:
    """Concatenate results without a table, and handles."""
    handles: list[Any] = []
    for part in parts:
        if isinstance(part, DataProtoFuture):
            if not part.has_whole_shards:
                part._require_table("concat")
            if part.is_table:
                raise BatchError("concat: some futures declare their columns and others do not; read the latter first.")
            handles += part.handles()
        else:
            handles.append(part)
    lengths = [part.num_rows for part in parts if isinstance(part, DataProtoFuture) and part.num_rows is not None]
    columns = {part.columns for part in parts if isinstance(part, DataProtoFuture)}
    return DataProtoFuture(
        concat_results,
        handles,
        num_rows=sum(lengths) if len(lengths) == len(parts) else None,
        columns=columns.pop() if len(columns) == 1 and len(lengths) == len(parts) else None,
        has_whole_shards=True,
    )


def _concat_tables(parts: Sequence[DataProtoFuture]) -> DataProtoFuture:
    tables = [part._places() for part in parts]
    for part, table in zip(parts, tables, strict=True):
        if set(table) != set(tables[0]):
            raise FieldError(f"concat: one future has {parts[0].columns}, another {part.columns}; select first.")
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in tables[0]:
        groups.setdefault(tuple(table[name].shards for table in tables), []).append(name)
    groups = groups or {(0,) * len(parts): []}
    shards, places = [], {}
    for number, (of_parts, names) in enumerate(groups.items()):
        pieces = [part._shards[index] for part, index in zip(parts, of_parts, strict=True)]
        same_names = all(table[name].name == tables[0][name].name for table in tables for name in names)
        if not same_names:
            there = [{name: table[name].name for name in names} for table in tables]
            pieces = [p.renamed(names_there) for p, names_there in zip(pieces, there, strict=True)]
        shards.append(Shards.concat(pieces))
        for name in names:
            places[name] = _joined([table[name] for table in tables], parts, number, "" if same_names else name)
    meta_info = concat_meta_info([part.meta_info for part in parts])
    return DataProtoFuture._of(shards, {n: places[n] for n in tables[0]}, sum(map(len, parts)), meta_info)


def _joined(places: Sequence[Place], parts: Sequence[DataProtoFuture], number: int, renamed: str) -> Place:
    """Return the place of a column of several futures, one after another."""
    marked = next((place for place in places if place.copies is not None), None)
    copies = None
    if marked is not None:
        copies = np.concatenate(
            [np.zeros(len(f), bool) if p.copies is None else p.copies for p, f in zip(places, parts, strict=True)]
        )
    return Place(number, renamed or places[0].name, copies, marked.fill if marked else None)


def _renamed(batch: DataProto, names: Mapping[str, str]) -> DataProto:
    """Return the batch with its columns `names[new]` under their new names."""
    if all(new == old for new, old in names.items()):
        return batch
    firsts = {old: new for new, old in reversed(list(names.items()))}
    renamed = batch.rename(list(firsts), list(firsts.values()))
    for new, old in names.items():
        if new != (first := firsts[old]):  # one column under two names: each with memory of its own
            copy = take(renamed, (first,)).select(deepcopy=True)
            renamed = renamed.union(copy.rename(first, new))
    return renamed


def _copies_of(place: Place) -> list[int]:
    return [] if place.copies is None else np.flatnonzero(place.copies).tolist()


def _is_tensor(name: str) -> bool:
    if name not in FIELDS:
        raise FieldError(
            f"select: whether {name!r} is a tensor is not known before the future is read; name batch_keys and "
            f"non_tensor_batch_keys both, use select_columns, or add the column to the glossary (FIELDS)."
        )
    return FIELDS[name].is_tensor
