"""DataProtoFuture, a batch that is elsewhere or not there yet.

It holds opaque handles of a backend and what to do with their contents. Everything but `get` needs no contents, so a
program can pass futures from one call to the next without the controller reading them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol.consistency import Names, as_names, require_names
from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.packed_batch import Rows
from hybridflow.protocol.padding import mark_copies
from hybridflow.protocol.rows import as_count, row_indices
from hybridflow.protocol.side_by_side import join_columns

Columns = tuple[str, ...]


class Handle(Protocol):
    """Where one result is; `get` waits for it, and raises what the call that makes it raised.

    A handle that also has `read(columns, rows)` is asked for no more than what is needed of a batch, and one that has
    `view(columns, rows)` may share memory where its contents are put together with others.
    """

    def get(self) -> Any: ...


class BatchHandle:
    """A batch of this process as a handle, so that it can stand beside others in a future."""

    def __init__(self, batch: DataProto) -> None:
        self.batch = batch

    def get(self) -> DataProto:
        return self.batch

    def read(self, columns: Columns | None, rows: Rows) -> DataProto:
        return take(self.batch, columns, rows)

    view = read


@dataclass(eq=False, repr=False)
class DataProtoFuture:
    """The batch that `collect_fn` makes of the handles' contents, then `dispatch_fn` of that.

    `num_rows` and `columns` are what the caller declares of it, where it knows: they give `len`, and let a union
    check its columns now and read only the parts that are asked for. `part_rows`, the rows of each handle's batch, may
    be given where `collect_fn` puts the batches one after another: then rows are read only from the handles that hold
    them. Operations return new futures and read nothing.
    """

    collect_fn: Callable[[list], Any]
    futures: Sequence[Any]
    dispatch_fn: Callable[[Any], Any] | None = None
    num_rows: int | None = None
    columns: Columns | None = None
    part_rows: Sequence[int] | None = None
    _contents: Any = field(default=None, init=False, repr=False)
    _first_rows: Any = field(default=None, init=False, repr=False)

    @staticmethod
    def of(batch: "DataProto | DataProtoFuture") -> "DataProtoFuture":
        """A batch of this process as a future; a future as it is."""
        if isinstance(batch, DataProtoFuture):
            return batch
        rows = len(batch)
        return DataProtoFuture(
            _first, [BatchHandle(batch)], num_rows=rows, columns=tuple(_names(batch)), part_rows=(rows,)
        )

    def get(self, columns: Names = None) -> Any:
        """Wait, and return a new batch: all of it, or only the named columns (of either kind) with meta_info.

        What a method returned that is no batch comes as `collect_fn` made it. Raises FieldError for a missing column,
        BatchError if the number of rows is not the declared one, and whatever the call raised.
        """
        wanted = None if columns is None else tuple(as_names(columns))
        if wanted is not None and self.columns is not None:
            require_names(wanted, self.columns, "the future")
        contents = self._read(wanted, None)
        if not isinstance(contents, DataProto):
            return contents
        if self.num_rows is not None and len(contents) != self.num_rows and _names(contents):
            raise BatchError(f"the future declared {self.num_rows} rows, but has {len(contents)}.")
        is_shared = self._contents is not None or self.collect_fn is not DataProto.concat
        return contents.select() if is_shared else contents

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
        """The rows of all parts, handles or futures, in order."""
        if not data:
            raise BatchError("concat needs at least one future, got an empty list.")
        lengths: list[Any] = [getattr(part, "num_rows", None) for part in data]
        columns = {getattr(part, "columns", None) for part in data}
        known = None not in lengths
        return DataProtoFuture(
            DataProto.concat,
            list(data),
            num_rows=sum(lengths) if known else None,
            columns=columns.pop() if len(columns) == 1 else None,
            part_rows=lengths if known else None,
        )

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """The parts of `DataProto.chunk`, each a future."""
        chunks = as_count(chunks, "chunks", 1)
        if self.num_rows is not None and self.num_rows % chunks == 0:
            size = self.num_rows // chunks
            return [self.slice(index * size, (index + 1) * size) for index in range(chunks)]
        return [
            self._then(partial(_chunk, chunks=chunks, index=index), num_rows=None, columns=self.columns)
            for index in range(chunks)
        ]

    def slice(self, start: int | None = None, end: int | None = None) -> "DataProtoFuture":
        """Rows `start:end`, as Python counts them. Raises BatchError if the number of rows is not known."""
        rows = range(len(self))[start:end]
        return self._rows(slice(rows.start, max(rows.start, rows.stop)), len(rows))

    def reorder(self, indices: Sequence[int] | np.ndarray) -> "DataProtoFuture":
        """The same rows in another order: an all-gather, as each part of the result then needs rows of every part.

        Raises BatchError unless `indices` names each row once, or if the number of rows is not known.
        """
        rows = row_indices(indices, len(self))
        if len(rows) != len(self) or len(np.unique(rows)) != len(self):
            raise BatchError(f"reorder needs each of the {len(self)} rows exactly once, got {len(rows)} indices.")
        return self._rows(rows, len(rows))

    def select_rows(self, rows: np.ndarray) -> "DataProtoFuture":
        """Some rows, by number, in any order and as often as they are named. Raises BatchError for one that is not
        there, or if the number of rows is not known."""
        chosen = row_indices(rows, len(self))
        return self._rows(chosen, len(chosen))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProtoFuture":
        """As `DataProto.repeat`."""
        times = as_count(repeat_times, "repeat_times", 0)
        if self.num_rows is None:
            step = partial(_call, name="repeat", arguments={"repeat_times": times, "interleave": interleave})
            return self._then(step, num_rows=None, columns=self.columns)
        rows = np.arange(self.num_rows)
        return self._rows(np.repeat(rows, times) if interleave else np.tile(rows, times), len(rows) * times)

    def pad_to_divisor(self, size_divisor: int) -> "DataProtoFuture":
        """As `pad_dataproto_to_divisor`: copies of the first rows at the end, marked as the glossary says."""
        pad_size = -len(self) % as_count(size_divisor, "size_divisor", 1)
        if not pad_size:
            return self
        return _Padded(_first, [self], num_rows=len(self) + pad_size, columns=self.columns)

    # Columns

    def select(
        self, batch_keys: Names = None, non_tensor_batch_keys: Names = None, meta_info_keys: Names = None
    ) -> "DataProtoFuture":
        """As `DataProto.select`."""
        keys = {
            "batch_keys": None if batch_keys is None else as_names(batch_keys),
            "non_tensor_batch_keys": None if non_tensor_batch_keys is None else as_names(non_tensor_batch_keys),
            "meta_info_keys": None if meta_info_keys is None else as_names(meta_info_keys),
        }
        chosen = (*as_names(batch_keys), *as_names(non_tensor_batch_keys))
        if self.columns is not None:
            require_names(chosen, self.columns, "select: the future")
        if batch_keys is None and non_tensor_batch_keys is None:
            step = partial(_call, name="select", arguments={"meta_info_keys": keys["meta_info_keys"]})
            return self._then(step, needs=_same, num_rows=self.num_rows, columns=self.columns)
        if batch_keys is not None and non_tensor_batch_keys is not None:
            future = self.select_columns(chosen)
            return future if meta_info_keys is None else future.select(meta_info_keys=meta_info_keys)
        step = partial(_call, name="select", arguments=keys)  # which columns stay is known only when they are read
        return self._then(step, needs=_everything, num_rows=self.num_rows, columns=None)

    def select_columns(self, columns: Names) -> "DataProtoFuture":
        """The named columns, of either kind, and meta_info."""
        chosen = tuple(as_names(columns))
        if self.columns is not None:
            require_names(chosen, self.columns, "select: the future")
        needs = partial(_among, chosen=chosen)
        return self._then(_as_it_is, needs=needs, num_rows=self.num_rows, columns=chosen)

    def rename(self, old_keys: Names = None, new_keys: Names = None) -> "DataProtoFuture":
        """As `DataProto.rename`."""
        old, new = as_names(old_keys), as_names(new_keys)
        if len(old) != len(new):
            raise FieldError(f"rename: {len(old)} old and {len(new)} different new names.")
        names = dict(zip(old, new, strict=True))
        columns = self.columns
        if columns is not None:
            require_names(old, columns, "rename: the future")
            columns = tuple(names.get(name, name) for name in columns)
            if len(set(columns)) < len(columns):
                raise FieldError(f"rename {old} to {new}: the future already has one of them, it has {self.columns}.")
        step, needs = partial(_rename, names=names), partial(_renamed, names=names)
        if columns is None:  # what is missing or taken shows only where everything is seen
            step, needs = partial(_call, name="rename", arguments={"old_keys": old, "new_keys": new}), _everything
        return self._then(step, needs=needs, num_rows=self.num_rows, columns=columns)

    def with_meta_info(self, more: dict[str, Any]) -> "DataProtoFuture":
        """The same columns, with more keys of meta_info, which replace those of the same name."""
        step = partial(_with_meta_info, more=more)
        return self._then(step, needs=_same, num_rows=self.num_rows, columns=self.columns)

    def union(self, other: "DataProtoFuture | DataProto") -> "DataProtoFuture":
        """As `DataProto.union`, of disjoint columns, or columns of the same origin in both: checked now where both
        declare their columns, else when read. Raises FieldError for any other column that both have."""
        if isinstance(other, DataProto) and not _names(other):
            return _Union(join_columns, [self, DataProtoFuture.of(other)], None, self.num_rows, self.columns)
        other = DataProtoFuture.of(other)
        if self.num_rows is not None and other.num_rows is not None and self.num_rows != other.num_rows:
            raise BatchError(f"union: this future has {self.num_rows} rows, the other has {other.num_rows}.")
        num_rows = self.num_rows if self.num_rows is not None else other.num_rows
        columns = None
        if self.columns is not None and other.columns is not None:
            shared = [name for name in self.columns if name in other.columns]
            differing = sorted(name for name in shared if self._origin(name) != other._origin(name))
            if differing:
                raise FieldError(f"union: both futures have {differing}; select or rename first.")
            if shared:
                other = other.select_columns([name for name in other.columns or () if name not in shared])
            columns = (*self.columns, *(other.columns or ()))
        return _Union(join_columns, [self, other], None, num_rows, columns)

    # Reading, and sending to a reader elsewhere

    def narrow(self, columns: Columns | None = None, rows: Rows = None) -> "DataProtoFuture":
        """A future of no more than these columns and rows, which holds no handle that they do not need: what is sent
        to somebody who reads it elsewhere."""
        num_rows = _count(rows, self.num_rows)
        if self.part_rows is None:
            if columns is None and rows is None:
                return self
            kept = self.columns if columns is None else columns
            return _Taken(_first, [self], num_rows=num_rows, columns=kept, asked=columns, rows=rows)
        pieces, order = _pieces(self._starts(), rows)
        parts = []
        for index, local in pieces:
            part = self.futures[index]
            if isinstance(part, DataProtoFuture):
                parts.append(part.narrow(columns, local))
            elif isinstance(part, BatchHandle):
                parts.append(BatchHandle(part.read(columns, local)))
            else:
                parts.append(part if columns is None and local is None else _Piece(part, columns, local))
        whole = DataProtoFuture(
            self.collect_fn, parts, num_rows=num_rows, columns=self.columns if columns is None else columns
        )
        return whole if order is None else _Rows(_first, [whole], num_rows=num_rows, columns=whole.columns, rows=order)

    @property
    def is_plain(self) -> bool:
        """Whether it is made of handles and the operations of this class alone, so that anybody can read it."""
        inner = [part for part in self.futures if isinstance(part, DataProtoFuture)]
        is_concat = self.collect_fn is DataProto.concat and self.dispatch_fn is None
        is_own = self.part_rows is not None or is_concat or isinstance(self, _OfOne | _Union)
        return is_own and all(part.is_plain for part in inner)

    def _is_here(self) -> bool:
        """Whether it is made of batches of this process alone."""
        return all(isinstance(handle, BatchHandle) for handle in self.handles())

    def handles(self) -> Iterator[Any]:
        """The handles it reads, those of the futures inside it included."""
        for part in self.futures:
            if isinstance(part, DataProtoFuture):
                yield from part.handles()
            else:
                yield part.handle if isinstance(part, _Piece) else part

    def sources(self) -> Iterator[tuple[Any, Columns]]:
        """Each handle with the columns that are read of it, by their names there; of a future that was narrowed."""
        for part in self.futures:
            if isinstance(part, DataProtoFuture):
                yield from part.sources()
            elif isinstance(part, _Piece):
                yield part.handle, part.columns if part.columns is not None else self.columns or ()
            else:
                yield part, self.columns or ()

    def with_handles(self, change: Callable[[Any], Any]) -> "DataProtoFuture":
        """The same future with every handle exchanged for `change(handle)`."""
        futures: list[Any] = []
        for part in self.futures:
            if isinstance(part, DataProtoFuture):
                futures.append(part.with_handles(change))
            elif isinstance(part, _Piece):
                futures.append(_Piece(change(part.handle), part.columns, part.rows))
            else:
                futures.append(change(part))
        return replace(self, futures=futures)

    def _read(self, columns: Columns | None, rows: Rows) -> Any:
        """A batch, read from no more handles than needed; handles that only have `get` are asked once."""
        if self.part_rows is None or self._contents is not None:
            return take(self._whole(columns, rows), columns, rows)
        pieces, order = _pieces(self._starts(), rows)
        read = "view" if len(pieces) > 1 else "read"
        batch = self.collect_fn([self._read_part(read, index, columns, local) for index, local in pieces])
        return batch if order is None else batch.select_idxs(order)

    def _starts(self) -> np.ndarray:
        """The first row of each part, then the number of rows."""
        if self._first_rows is None:
            self._first_rows = np.concatenate([[0], np.cumsum(np.asarray(self.part_rows, dtype=np.int64))])
        return self._first_rows

    def _read_part(self, read: str, index: int, columns: Columns | None, rows: Rows) -> DataProto:
        part = self.futures[index]
        if isinstance(part, DataProtoFuture):
            return part._read(columns, rows)
        batch = getattr(part, read)(columns, rows) if hasattr(part, read) else take(part.get(), columns, rows)
        expected = self.part_rows[index] if rows is None else None  # pyright: ignore[reportOptionalSubscript]
        if expected is not None and len(batch) != expected and _names(batch):
            raise BatchError(f"the future declared {self.num_rows} rows, but part {index} has {len(batch)}.")
        return batch

    def _whole(self, columns: Columns | None, rows: Rows) -> Any:
        """Everything that the handles hold, read once: the parts of one future share it."""
        if self._contents is not None:
            return self._contents
        contents = self.collect_fn([handle.get() for handle in self.futures])
        if self.dispatch_fn is not None:
            contents = self.dispatch_fn(contents)
        if isinstance(contents, DataProto):
            self._contents = contents
        elif columns is not None or rows is not None:
            raise BatchError(f"the call returned a {type(contents).__name__}, which has no columns; use get().")
        return contents

    def then(self, step: Callable[[DataProto], DataProto], num_rows: int | None) -> "DataProtoFuture":
        """A future of `step(batch)`, which needs all of the batch; done by whoever reads it: picklable."""
        return self._then(step, num_rows=num_rows, columns=None)

    def _origin(self, column: str) -> Any:
        """Equal for two columns of two futures that are the same handles' contents, without looking at them."""
        return (*(id(handle) for handle in self.futures), id(self.collect_fn), id(self.dispatch_fn), column)

    def _rows(self, rows: Rows, num_rows: int) -> "_Rows":
        return _Rows(_first, [self], num_rows=num_rows, columns=self.columns, rows=rows)

    def _then(
        self,
        step: Callable,
        *,
        num_rows: int | None,
        columns: Columns | None,
        needs: Callable[[Columns | None], Columns | None] | None = None,
    ) -> "_Step":
        return _Step(_first, [self], step, num_rows, columns, needs=needs)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_contents": None}


@dataclass(eq=False, repr=False)
class _Piece:
    """Some columns and rows of one handle."""

    handle: Any
    columns: Columns | None
    rows: Rows

    def get(self) -> DataProto:
        if hasattr(self.handle, "read"):
            return self.handle.read(self.columns, self.rows)
        return take(self.handle.get(), self.columns, self.rows)


@dataclass(eq=False, repr=False)
class _OfOne(DataProtoFuture):
    """A future made of one other."""

    @property
    def _source(self) -> DataProtoFuture:
        return self.futures[0]


@dataclass(eq=False, repr=False)
class _Taken(_OfOne):
    """Columns and rows of a future that can only be read as a whole."""

    asked: Columns | None = None
    rows: Rows = None

    def _read(self, columns: Columns | None, rows: Rows) -> Any:
        return take(take(self._source._read(self.asked, self.rows), columns, None), None, rows)


@dataclass(eq=False, repr=False)
class _Rows(_OfOne):
    """Some rows of another future, in any order."""

    rows: Rows = None

    def _read(self, columns: Columns | None, rows: Rows) -> Any:
        return self._source._read(columns, _compose(self.rows, rows, len(self._source)))

    def narrow(self, columns: Columns | None = None, rows: Rows = None) -> DataProtoFuture:
        return self._source.narrow(columns, _compose(self.rows, rows, len(self._source)))

    def _origin(self, column: str) -> Any:
        rows = self.rows.tobytes() if isinstance(self.rows, np.ndarray) else str(self.rows)
        return self._source._origin(column), rows


@dataclass(eq=False, repr=False)
class _Padded(_OfOne):
    """Another future with copies of its first rows at the end."""

    def _read(self, columns: Columns | None, rows: Rows) -> Any:
        return self.narrow(columns, rows)._read(None, None)

    def narrow(self, columns: Columns | None = None, rows: Rows = None) -> DataProtoFuture:
        num_rows = len(self._source)
        wanted = np.arange(len(self))[slice(None) if rows is None else rows]
        if not len(wanted) or wanted.max() < num_rows:
            return self._source.narrow(columns, rows)
        source = self._source.narrow(columns, wanted % num_rows)
        copies = np.flatnonzero(wanted >= num_rows)
        return _Marked(_first, [source], num_rows=len(wanted), columns=source.columns, copies=copies)


@dataclass(eq=False, repr=False)
class _Marked(_OfOne):
    """Another future some of whose rows are copies, which the glossary may want marked."""

    copies: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def _read(self, columns: Columns | None, rows: Rows) -> Any:
        return mark_copies(self._source._read(columns, rows), self._copies_among(rows))

    def narrow(self, columns: Columns | None = None, rows: Rows = None) -> DataProtoFuture:
        source = self._source.narrow(columns, rows)
        copies = self._copies_among(rows)
        return _Marked(_first, [source], num_rows=source.num_rows, columns=source.columns, copies=copies)

    def _copies_among(self, rows: Rows) -> np.ndarray:
        if rows is None:
            return self.copies
        return np.flatnonzero(np.isin(np.arange(len(self))[rows], self.copies))


@dataclass(eq=False, repr=False)
class _Step(_OfOne):
    """One operation on another future. `needs` maps the columns asked of this one to those asked of that one; None:
    the operation needs all rows and columns, and makes others of them."""

    needs: Callable[[Columns | None], Columns | None] | None = field(default=None, kw_only=True)

    def _read(self, columns: Columns | None, rows: Rows) -> Any:
        if self.needs is None:
            return take(self._step(self._source._read(None, None)), columns, rows)
        return take(self._step(self._source._read(self._needed(columns), rows)), columns, None)

    def narrow(self, columns: Columns | None = None, rows: Rows = None) -> DataProtoFuture:
        if self.needs is None:
            return DataProtoFuture.narrow(self, columns, rows)
        source = self._source.narrow(self._needed(columns), rows)
        if self.dispatch_fn is _as_it_is:
            return source
        num_rows = _count(rows, self.num_rows)
        if self.needs is _everything:
            step = _Step(_first, [source], self.dispatch_fn, num_rows, self.columns, needs=_everything)
            return step if columns is None else _Taken(_first, [step], None, num_rows, columns, asked=columns)
        kept = self.columns if columns is None else columns
        return _Step(_first, [source], self.dispatch_fn, num_rows, kept, needs=self.needs)

    def _step(self, contents: Any) -> Any:
        return self.dispatch_fn(contents)  # pyright: ignore[reportOptionalCall]

    def _needed(self, columns: Columns | None) -> Columns | None:
        return self.needs(columns)  # pyright: ignore[reportOptionalCall]

    def _origin(self, column: str) -> Any:
        is_step_of = getattr(self.dispatch_fn, "func", self.dispatch_fn)
        if is_step_of in (_as_it_is, _with_meta_info):
            return self._source._origin(column)
        if isinstance(self.dispatch_fn, partial) and self.dispatch_fn.func is _rename:
            return self._source._origin(_back(self.dispatch_fn.keywords["names"]).get(column, column))
        return id(self), column


@dataclass(eq=False, repr=False)
class _Union(DataProtoFuture):
    """Futures side by side; one that declares its columns is read only if some of them are asked for."""

    def _read(self, columns: Columns | None, rows: Rows) -> Any:
        return take(self.collect_fn([part._read(asked, rows) for part, asked in self._asked(columns)]), columns, None)

    def narrow(self, columns: Columns | None = None, rows: Rows = None) -> DataProtoFuture:
        parts = [part.narrow(asked, rows) for part, asked in self._asked(columns)]
        kept = self.columns if columns is None else columns
        num_rows = _count(rows, self.num_rows)
        union = parts[0] if len(parts) == 1 else _Union(self.collect_fn, parts, None, num_rows, kept)
        if columns is None or all(part.columns is not None for part in self.futures):
            return union
        return _Taken(_first, [union], None, num_rows, columns, asked=columns)

    def _asked(self, columns: Columns | None) -> list[tuple[DataProtoFuture, Columns | None]]:
        """What to read. A part without any of the columns gives its meta_info if it is here, or if there is no other:
        what is elsewhere is not waited for because of it."""
        asked = []
        for part in self.futures:
            if columns is None or part.columns is None:
                asked.append((part, None))
            elif (chosen := tuple(name for name in columns if name in part.columns)) or part._is_here():
                asked.append((part, chosen))
        return asked or [(part, () if part.columns is not None else None) for part in self.futures]

    def _origin(self, column: str) -> Any:
        for part in self.futures:
            if part.columns is not None and column in part.columns:
                return part._origin(column)
        return id(self), column


def narrowed(value: Any) -> Any:
    """A future, or each one in lists and dicts, with no more handles than it needs; anything else as it is."""
    return change_futures(value, lambda future: future.narrow())


def opened(value: Any) -> Any:
    """A future, or each one in lists and dicts, as what it stands for; anything else as it is."""
    return change_futures(value, lambda future: future.get())


def change_futures(value: Any, change: Callable[[DataProtoFuture], Any]) -> Any:
    """The value with every future, also in lists, tuples and dicts, exchanged for `change(future)`."""
    if isinstance(value, DataProtoFuture):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(change_futures(element, change) for element in value)
    if type(value) is dict:
        return {key: change_futures(element, change) for key, element in value.items()}
    return value


def take(data: Any, columns: Columns | None = None, rows: Rows = None) -> Any:
    """Columns and rows of a batch, None for all; a batch as it is where both are None."""
    if columns is not None:
        present = _names(data)
        require_names(columns, present, "the future")
        arrays = [name for name in columns if name in data.non_tensor_batch]
        tensors = [name for name in columns if name not in data.non_tensor_batch]
        data = data.select(tensors, arrays)
    if rows is None or (data.batch is None and not data.non_tensor_batch):
        return data
    return data.select_idxs(rows) if isinstance(rows, np.ndarray) else data[rows]


def _names(data: DataProto) -> list[str]:
    return [*(() if data.batch is None else data.batch.keys()), *data.non_tensor_batch]  # pyright: ignore


def _pieces(starts: np.ndarray, rows: Rows) -> tuple[list[tuple[int, Rows]], np.ndarray | None]:
    """Which rows to read of which parts, and how to order them then (None: as they come); at least one part.

    `starts` are the first rows of the parts, and the number of all rows.
    """
    if rows is None:
        return [(index, None) for index in range(len(starts) - 1)], None
    pieces: list[tuple[int, Rows]] = []
    if isinstance(rows, slice):
        chosen = range(int(starts[-1]))[rows]
        begin, end = chosen.start, max(chosen.start, chosen.stop)
        first_part = max(int(np.searchsorted(starts, begin, side="right")) - 1, 0)
        last_part = int(np.searchsorted(starts, end, side="left"))
        for index in range(first_part, last_part):
            start, stop = int(starts[index]), int(starts[index + 1])
            first, last = max(begin, start), min(end, stop)
            if first < last:
                whole = (first, last) == (start, stop)
                pieces.append((index, None if whole else slice(first - start, last - start)))
        return pieces or [(0, slice(0, 0))], None
    part_of = np.searchsorted(starts, rows, side="right") - 1
    order = np.argsort(part_of, kind="stable")
    for index in np.unique(part_of).tolist():
        pieces.append((index, rows[part_of == index] - starts[index]))
    in_order = bool((order[1:] > order[:-1]).all())
    return pieces or [(0, slice(0, 0))], None if in_order else np.argsort(order)


def _count(rows: Rows, num_rows: int | None) -> int | None:
    """How many rows are left of `num_rows`, where that is known."""
    if rows is None or num_rows is None:
        return num_rows if rows is None or isinstance(rows, slice) else len(rows)
    return len(range(num_rows)[rows]) if isinstance(rows, slice) else len(rows)


def _compose(first: Rows, second: Rows, num_rows: int) -> Rows:
    """Rows `second` of the rows `first` of a batch."""
    if second is None or first is None:
        return first if second is None else second
    if isinstance(first, slice) and isinstance(second, slice):
        chosen = range(num_rows)[first][second]
        return slice(chosen.start, max(chosen.start, chosen.stop))
    return first[second] if isinstance(first, np.ndarray) else np.arange(num_rows)[first][second]


def _first(contents: list) -> Any:
    return contents[0]


def _as_it_is(data: DataProto) -> DataProto:
    return data


def _chunk(data: DataProto, chunks: int, index: int) -> DataProto:
    return data.chunk(chunks)[index]


def _call(data: DataProto, name: str, arguments: dict[str, Any]) -> DataProto:
    return getattr(data, name)(**arguments)


def _with_meta_info(data: DataProto, more: dict[str, Any]) -> DataProto:
    changed = data.select()
    changed.meta_info.update(more)
    return changed


def _rename(data: DataProto, names: dict[str, str]) -> DataProto:
    """Where only some columns were read, only those are renamed."""
    present = _names(data)
    return data.rename(*zip(*names.items(), strict=True)) if all(n in present for n in names) else _some(data, names)


def _some(data: DataProto, names: dict[str, str]) -> DataProto:
    there = {old: new for old, new in names.items() if old in _names(data)}
    return data.rename(list(there), list(there.values())) if there else data


def _same(columns: Columns | None) -> Columns | None:
    return columns


def _everything(columns: Columns | None) -> Columns | None:
    return None


def _among(columns: Columns | None, chosen: Columns) -> Columns:
    return chosen if columns is None else columns


def _renamed(columns: Columns | None, names: dict[str, str]) -> Columns | None:
    if columns is None:
        return None
    back = _back(names)
    return tuple(dict.fromkeys(back.get(name, name) for name in columns))


def _back(names: dict[str, str]) -> dict[str, str]:
    return {new: old for old, new in names.items()}
