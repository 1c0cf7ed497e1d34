"""DataProtoFuture, a batch that is elsewhere or not there yet.

It holds opaque handles of a backend and what to do with their contents. Everything but `get` needs no contents, so a
program can pass futures from one call to the next without the controller reading them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, Protocol

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol.consistency import Names, as_names, require_names
from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.rows import as_count

Columns = tuple[str, ...]


class Handle(Protocol):
    """Where one result is; `get` waits for it, and raises what the call that makes it raised."""

    def get(self) -> Any: ...


@dataclass(eq=False)
class DataProtoFuture:
    """The batch that `collect_fn` makes of the handles' contents, then `dispatch_fn` of that.

    `num_rows` and `columns` are what the caller declares of it, where it knows: they give `len`, and let a union
    check its columns now and read only the parts that are asked for. Operations return new futures and read nothing.
    """

    collect_fn: Callable[[list], Any]
    futures: Sequence[Handle]
    dispatch_fn: Callable[[Any], Any] | None = None
    num_rows: int | None = None
    columns: Columns | None = None
    _contents: DataProto | None = field(default=None, init=False, repr=False)

    def get(self, columns: Names = None) -> Any:
        """Wait, and return a new batch: all of it, or only the named columns (of either kind) with meta_info.

        What a method returned that is no batch comes as `collect_fn` made it. Raises FieldError for a missing column,
        BatchError if the number of rows is not the declared one, and whatever the call raised.
        """
        wanted = None if columns is None else tuple(as_names(columns))
        if wanted is not None and self.columns is not None:
            require_names(wanted, self.columns, "the future")
        contents = self._read(wanted)
        if not isinstance(contents, DataProto):
            if wanted is None:
                return contents
            raise BatchError(
                f"the call returned a {type(contents).__name__}, which has no columns {wanted}; use get()."
            )
        if self.num_rows is not None and len(contents) != self.num_rows:
            raise BatchError(f"the future declared {self.num_rows} rows, but has {len(contents)}.")
        return contents.select() if wanted is None else _only(contents, wanted)

    def __len__(self) -> int:
        if self.num_rows is None:
            raise BatchError("the number of rows is not known before the future is read; use len(future.get()).")
        return self.num_rows

    def __bool__(self) -> bool:
        return True

    @staticmethod
    def concat(data: "Sequence[Handle]") -> "DataProtoFuture":
        """The rows of all parts, handles or futures, in order."""
        if not data:
            raise BatchError("concat needs at least one future, got an empty list.")
        lengths: list[Any] = [getattr(part, "num_rows", None) for part in data]
        columns = {getattr(part, "columns", None) for part in data}
        return DataProtoFuture(
            DataProto.concat,
            list(data),
            num_rows=None if None in lengths else sum(lengths),
            columns=columns.pop() if len(columns) == 1 else None,
        )

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """The parts of `DataProto.chunk`, each a future."""
        chunks = as_count(chunks, "chunks", 1)
        even = self.num_rows is not None and self.num_rows % chunks == 0
        num_rows = self.num_rows // chunks if self.num_rows is not None and even else None
        return [
            self._then(partial(_chunk, chunks=chunks, index=index), _same, num_rows, self.columns)
            for index in range(chunks)
        ]

    def select(
        self, batch_keys: Names = None, non_tensor_batch_keys: Names = None, meta_info_keys: Names = None
    ) -> "DataProtoFuture":
        """As `DataProto.select`."""
        keys = {
            "batch_keys": None if batch_keys is None else as_names(batch_keys),
            "non_tensor_batch_keys": None if non_tensor_batch_keys is None else as_names(non_tensor_batch_keys),
            "meta_info_keys": None if meta_info_keys is None else as_names(meta_info_keys),
        }
        chosen = [*as_names(batch_keys), *as_names(non_tensor_batch_keys)]
        if self.columns is not None:
            require_names(chosen, self.columns, "select: the future")
        both = batch_keys is not None and non_tensor_batch_keys is not None
        columns = tuple(chosen) if both else None
        needs = partial(_always, always=columns) if both else partial(_always, always=None)
        return self._then(partial(_call, name="select", arguments=keys), needs, self.num_rows, columns)

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
        step = partial(_call, name="rename", arguments={"old_keys": old, "new_keys": new})
        return self._then(step, partial(_renamed, names=names), self.num_rows, columns)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProtoFuture":
        """As `DataProto.repeat`."""
        times = as_count(repeat_times, "repeat_times", 0)
        step = partial(_call, name="repeat", arguments={"repeat_times": times, "interleave": interleave})
        return self._then(step, _same, None if self.num_rows is None else self.num_rows * times, self.columns)

    def union(self, other: "DataProtoFuture") -> "DataProtoFuture":
        """As `DataProto.union`, of disjoint columns: checked now where both declare them, else when read."""
        if self.num_rows is not None and other.num_rows is not None and self.num_rows != other.num_rows:
            raise BatchError(f"union: this future has {self.num_rows} rows, the other has {other.num_rows}.")
        columns = None
        if self.columns is not None and other.columns is not None:
            shared = sorted(set(self.columns) & set(other.columns))
            if shared:
                raise FieldError(f"union: both futures have {shared}; select or rename first.")
            columns = self.columns + other.columns
        num_rows = self.num_rows if self.num_rows is not None else other.num_rows
        return _Union(_union, [self, other], None, num_rows, columns)

    def _read(self, columns: Columns | None) -> Any:
        """Everything, read once: the parts of one future share what it has read."""
        if self._contents is not None:
            return self._contents
        contents = self.collect_fn([handle.get() for handle in self.futures])
        if self.dispatch_fn is not None:
            contents = self.dispatch_fn(contents)
        if isinstance(contents, DataProto):
            self._contents = contents
        return contents

    def _then(self, step: Callable, needs: Callable, num_rows: int | None, columns: Columns | None) -> "_Step":
        return _Step(_first, [self], step, num_rows, columns, needs=needs)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_contents": None}


@dataclass(eq=False)
class _Step(DataProtoFuture):
    """One operation on one other future; `needs` maps the columns asked of this one to those asked of that one."""

    needs: Callable[[Columns | None], Columns | None] = field(kw_only=True)

    def _read(self, columns: Columns | None) -> Any:
        (source,) = self.futures
        return self.dispatch_fn(source.get(self.needs(columns)))  # pyright: ignore


@dataclass(eq=False)
class _Union(DataProtoFuture):
    """Two futures side by side; one that declares its columns is read only if some of them are asked for."""

    def _read(self, columns: Columns | None) -> Any:
        contents = []
        for part in self.futures:
            known = part.columns  # pyright: ignore[reportAttributeAccessIssue]
            if columns is None or known is None:
                contents.append(part.get())
                continue
            asked = tuple(name for name in columns if name in known)
            if asked:
                contents.append(part.get(asked))  # pyright: ignore[reportCallIssue]
        return self.collect_fn(contents or [part.get() for part in self.futures])


def _only(data: DataProto, columns: Columns) -> DataProto:
    present = [*(() if data.batch is None else data.batch.keys()), *data.non_tensor_batch]
    require_names(columns, present, "the future")
    arrays = [name for name in columns if name in data.non_tensor_batch]
    return data.select([name for name in columns if name not in data.non_tensor_batch], arrays)


def _first(contents: list) -> Any:
    return contents[0]


def _union(parts: list[DataProto]) -> DataProto:
    return reduce(_disjoint_union, parts)


def _disjoint_union(first: DataProto, second: DataProto) -> DataProto:
    names = [{*(() if d.batch is None else d.batch.keys()), *d.non_tensor_batch} for d in (first, second)]
    shared = sorted(names[0] & names[1])
    if shared:
        raise FieldError(f"union: both futures have {shared}; select or rename first.")
    return first.union(second)


def _chunk(data: DataProto, chunks: int, index: int) -> DataProto:
    return data.chunk(chunks)[index]


def _call(data: DataProto, name: str, arguments: dict[str, Any]) -> DataProto:
    return getattr(data, name)(**arguments)


def _same(columns: Columns | None) -> Columns | None:
    return columns


def _always(columns: Columns | None, always: Columns | None) -> Columns | None:
    return always


def _renamed(columns: Columns | None, names: dict[str, str]) -> Columns | None:
    if columns is None:
        return None
    back = {new: old for old, new in names.items()}
    return tuple(dict.fromkeys([*(back.get(name, name) for name in columns), *names]))
