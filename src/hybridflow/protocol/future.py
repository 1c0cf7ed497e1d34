"""`DataProtoFuture`: a batch on other processes, or one that is not computed yet.

It is a table that maps each column to its shards: handles and an index of rows. Operations on columns change the table,
operations on rows change the index; neither reads contents. Only `get` does. The result of a method that does not
declare its columns has no table: it can be read, passed on, or split by whole shards.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.errors import BatchError, DispatchError
from hybridflow.protocol.batch import Names, as_names, require_names
from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.handle import Columns, Handle, HeldBatch, names_of, take, wait_for
from hybridflow.protocol.meta_info import concat_meta_info, copy_structure, union_meta_info
from hybridflow.protocol.rows import RowIndex, as_count, row_indices
from hybridflow.protocol.table import ColumnTable


class DataProtoFuture:
    """A future batch: `collect_fn` applied to the contents of the handles, then `dispatch_fn` if given.

    `num_rows`, `columns` and `part_rows` (rows of each handle's batch) are its declared layout. If all three are given
    and `collect_fn` is `DataProto.concat`, the future is a table: every operation is lazy, and `get` reads only the
    columns and rows that are needed. `has_whole_shards`: each handle holds a batch, and the result is their
    concatenation. `meta_info` holds the keys known in this process; `get` adds those of the handles' batches.
    Operations return new futures.
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
        self._table: ColumnTable | None = None
        self._contents: Any = None
        if columns is not None and part_rows is not None and is_concat:
            self._table = ColumnTable.of(self._handles, part_rows, columns)

    @classmethod
    def _of(cls, table: ColumnTable, num_rows: int, meta_info: dict[str, Any]) -> "DataProtoFuture":
        made = cls.__new__(cls)
        made.collect_fn, made.dispatch_fn, made.has_whole_shards = DataProto.concat, None, True
        made.num_rows, made.meta_info = num_rows, copy_structure(meta_info)
        made._handles, made._declared, made._contents = [], None, None
        made._table = table
        return made

    @staticmethod
    def of(batch: "DataProto | DataProtoFuture") -> "DataProtoFuture":
        """Return a batch of this process as a future, and a future unchanged."""
        if isinstance(batch, DataProtoFuture):
            return batch
        held, rows = HeldBatch(batch.select(meta_info_keys=())), len(batch)
        table = ColumnTable.of([held], [rows], tuple(names_of(batch)))
        return DataProtoFuture._of(table, rows, batch.meta_info)

    @property
    def columns(self) -> Columns | None:
        """The names of the columns, or None if the method does not declare them."""
        return self._declared if self._table is None else tuple(self._table.places)

    @property
    def futures(self) -> list[Any]:
        """The handles that the future reads."""
        return list(self.handles())

    @property
    def is_table(self) -> bool:
        """Whether columns and rows are known, so that every operation is lazy."""
        return self._table is not None

    def get(self, columns: Names = None) -> Any:
        """Wait for the result and return a new batch of the named columns (None: all) with meta_info.

        A result that is not a batch is returned as `collect_fn` built it. Raises FieldError for a missing column,
        BatchError if the number of rows differs from the declared one, and the errors of the call.
        """
        wanted = None if columns is None else tuple(as_names(columns))
        if wanted is not None and self.columns is not None:
            require_names(wanted, self.columns, "the future")
        contents = self._collected(wanted) if self._table is None else self._table.read(wanted, self.meta_info)
        if not isinstance(contents, DataProto):
            return contents
        if self.num_rows is not None and len(contents) != self.num_rows and names_of(contents):
            raise BatchError(f"the future declares {self.num_rows} rows, but has {len(contents)}.")
        return contents

    def __len__(self) -> int:
        if self.num_rows is None:
            raise BatchError("the number of rows is not known before the future is read; use len(future.get()).")
        return self.num_rows

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        rows = "an unknown number of rows" if self.num_rows is None else f"{self.num_rows} rows"
        columns = "undeclared columns" if self.columns is None else ", ".join(self.columns) or "no columns"
        return f"DataProtoFuture of {rows}: {columns}"

    # Rows

    @staticmethod
    def concat(data: "Sequence[Handle | DataProtoFuture]") -> "DataProtoFuture":
        """Return the rows of all parts, in order; the parts are futures with the same columns, or whole shards."""
        if not data:
            raise BatchError("concat needs at least one future, got an empty list.")
        parts = [part for part in data if isinstance(part, DataProtoFuture)]
        if len(parts) < len(data) or not all(part.is_table for part in parts):
            return _concat_shards(data)
        lengths = [len(part) for part in parts]
        table = ColumnTable.concat([part._require_table("concat") for part in parts], lengths)
        return DataProtoFuture._of(table, sum(lengths), concat_meta_info([part.meta_info for part in parts]))

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Return `chunks` equal parts; parts of a result without declared columns consist of whole shards."""
        chunks = as_count(chunks, "chunks", 1)
        if self._table is not None:
            size, rest = divmod(len(self), chunks)
            if rest:
                raise BatchError(f"{len(self)} rows do not make {chunks} equal parts; pad_to_divisor({chunks}) first.")
            self._table.names_in(0)  # computed once for all parts
            return [self._choose(slice(index * size, (index + 1) * size), size) for index in range(chunks)]
        size, rest = divmod(len(self._handles), chunks)
        if rest or not self.has_whole_shards:
            self._require_table(f"chunk({chunks}) of {len(self._handles)} shards")
        return [_of_shards(self._handles[index * size : (index + 1) * size]) for index in range(chunks)]

    def slice(self, start: int | None = None, end: int | None = None) -> "DataProtoFuture":
        """Return the rows `start:end` of a Python slice."""
        self._require_table("slice")
        try:
            rows = range(len(self))[start:end]
        except TypeError as error:
            raise BatchError(f"slice({start!r}, {end!r}): {error}.") from error
        return self._choose(slice(rows.start, max(rows.start, rows.stop)), len(rows))

    def select_rows(self, rows: np.ndarray) -> "DataProtoFuture":
        """Return rows by number, in any order and with repetitions. Raises BatchError for a row out of range."""
        self._require_table("select_rows")
        chosen = row_indices(rows, len(self))
        return self._choose(chosen, len(chosen))

    def pad_to_divisor(self, size_divisor: int) -> "DataProtoFuture":
        """Append copies of the first rows up to a multiple of `size_divisor`, as `pad_dataproto_to_divisor`."""
        table, num_rows = self._require_table("pad_to_divisor"), len(self)
        padded = num_rows + -num_rows % as_count(size_divisor, "size_divisor", 1)
        if padded == num_rows or not num_rows:
            return self
        return DataProtoFuture._of(table.pad(num_rows, padded), padded, self.meta_info)

    # Columns

    def select_columns(self, columns: Names) -> "DataProtoFuture":
        """Return the named columns of either kind, with meta_info."""
        table = self._require_table("select_columns").select(as_names(columns))
        return DataProtoFuture._of(table, len(self), self.meta_info)

    def rename(self, old_keys: Names = None, new_keys: Names = None) -> "DataProtoFuture":
        """Return the columns under new names, as `DataProto.rename`."""
        table = self._require_table("rename").rename(as_names(old_keys), as_names(new_keys))
        return DataProtoFuture._of(table, len(self), self.meta_info)

    def with_meta_info(self, more: Mapping[str, Any]) -> "DataProtoFuture":
        """Return the same columns with more keys of meta_info, which replace keys of the same name."""
        table = self._require_table("with_meta_info")
        table = table.map_shards(
            lambda shards: shards.with_views(lambda view: view._replace(skipped=view.skipped.union(more)))
        )
        return DataProtoFuture._of(table, len(self), {**self.meta_info, **more})

    def union(self, other: "DataProtoFuture | DataProto") -> "DataProtoFuture":
        """Return the columns of both; a column in both must consist of the same rows of the same shards.

        Raises FieldError for another column that both have, BatchError for different numbers of rows, for different
        values of a key of meta_info, and for a future that has no table.
        """
        table = self._require_table("union")
        meta_info = union_meta_info(self.meta_info, other.meta_info)
        if isinstance(other, DataProto) and not names_of(other):
            return DataProtoFuture._of(table, len(self), meta_info)
        other = DataProtoFuture.of(other)
        others = other._require_table("union")
        if len(self) != len(other):
            raise BatchError(f"union: this future has {len(self)} rows, the other has {len(other)}.")
        return DataProtoFuture._of(table.union(others), len(self), meta_info)

    # Reading, and sending to a reader in another process

    def narrow(self) -> "DataProtoFuture":
        """Return the same columns and rows with the handles that they need, to send to another process."""
        if self._table is None:
            return self
        return DataProtoFuture._of(self._table.narrow(), len(self), self.meta_info)

    def sources(self) -> list[tuple[Handle, Columns]]:
        """Return the handles, each with the stored names of the columns that are read from it."""
        if self._table is None:
            return [(handle, self._declared or ()) for handle in self._handles]
        return self._table.sources()

    def handles(self) -> list[Handle]:
        """Return the handles that the future reads."""
        return [handle for handle, _ in self.sources()]

    def with_handles(self, change: Callable[[Handle], Any]) -> "DataProtoFuture":
        """Return the same future with every handle replaced by `change(handle)`."""
        if self._table is not None:
            table = self._table.map_shards(lambda shards: shards.with_handles(change))
            return DataProtoFuture._of(table, len(self), self.meta_info)
        changed = [change(handle) for handle in self._handles]
        if self.has_whole_shards:
            return _of_shards(changed)
        return DataProtoFuture(self.collect_fn, changed, self.dispatch_fn, self.num_rows, self._declared)

    def _collected(self, columns: Columns | None) -> Any:
        """Read a result without a table: the whole contents of all handles, once."""
        if self._contents is None:
            wait_for(self._handles)
            contents = self.collect_fn([handle.get() for handle in self._handles])
            self._contents = contents if self.dispatch_fn is None else self.dispatch_fn(contents)
        if isinstance(self._contents, DataProto):
            return take(self._contents, columns).select()
        if columns is not None:
            raise BatchError(f"the call returned a {type(self._contents).__name__}, which has no columns; use get().")
        return self._contents

    def _choose(self, rows: RowIndex, num_rows: int) -> "DataProtoFuture":
        return DataProtoFuture._of(self._require_table("choosing rows").choose(rows), num_rows, self.meta_info)

    def _require_table(self, what: str) -> ColumnTable:
        if self._table is None:
            raise BatchError(
                f"{what} needs a result whose columns and number of rows are known before it is read; declare "
                f"writes=(...) in the @register of its method, or read it first with future.get()."
            )
        return self._table

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_contents": None}


def concat_results(results: Sequence[Any]) -> DataProto | None:
    """Return the rows of the results of all ranks, in rank order; None if every rank returned None."""
    if all(result is None for result in results):
        return None
    for index, result in enumerate(results):
        if not isinstance(result, DataProto):
            raise DispatchError(
                f"output {index} of {len(results)} is {type(result).__name__}, but only DataProto can be concatenated; "
                f"use DP_COMPUTE_METRIC or DP_COMPUTE to get a list of the results."
            )
    return DataProto.concat(results)


def change_each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return the value with every object of a kind, also in lists, tuples and dicts, replaced by `change(object)`."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(change_each(element, kind, change) for element in value)
    if type(value) is dict:
        return {key: change_each(element, kind, change) for key, element in value.items()}
    return value


def _of_shards(handles: Sequence[Any]) -> DataProtoFuture:
    return DataProtoFuture(concat_results, handles, has_whole_shards=True)


def _concat_shards(parts: Sequence[Any]) -> DataProtoFuture:
    """Concatenate results without a table, and handles."""
    handles: list[Any] = []
    for part in parts:
        if isinstance(part, DataProtoFuture) and part.is_table:
            raise BatchError("concat: some futures declare their columns and others do not; read the latter first.")
        if isinstance(part, DataProtoFuture) and not part.has_whole_shards:
            part._require_table("concat")
        handles += part.handles() if isinstance(part, DataProtoFuture) else [part]
    return _of_shards(handles)
