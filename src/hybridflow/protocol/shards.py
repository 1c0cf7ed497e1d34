"""`Shards`: the handles that hold the rows of some columns, in order, and the index of the selected rows.

Selecting rows changes only the index. Reading requests only the selected rows from each handle.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from hybridflow.errors import BatchError
from hybridflow.protocol.concat import concat_batches
from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.handle import Columns, Handle, HeldBatch, names_of, with_names
from hybridflow.protocol.rows import RowIndex, as_slice_if_contiguous, compose, count_rows_of, is_same_index

HandleRows = tuple[int, RowIndex]
"""The number of a handle, and the rows to read from it."""


class View(NamedTuple):
    """Column names and meta_info keys of a handle as the future presents them.

    `names[new]` is the stored name of a renamed column. Of meta_info all keys are read but the `skipped` ones.
    """

    names: Mapping[str, str] = {}
    skipped: frozenset[str] = frozenset()

    def stored_name(self, column: str) -> str:
        """Return the name of a column in the handle's batch."""
        return self.names.get(column, column)

    def meta_info(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of the handle's meta_info that are read."""
        if not self.skipped:
            return found
        return {key: value for key, value in found.items() if key not in self.skipped}


PLAIN = View()


class Shards:
    """Handles of consecutive rows, and the selected rows.

    `starts` holds the first row of each handle, then the total number of rows; `rows` selects among them. `views` has
    one entry per handle.
    """

    __slots__ = ("handles", "rows", "starts", "views")

    def __init__(
        self,
        handles: Sequence[Handle],
        starts: Sequence[int],
        rows: RowIndex = None,
        views: Sequence[View] | None = None,
    ) -> None:
        self.handles, self.starts, self.rows = handles, starts, rows
        self.views = [PLAIN] * len(handles) if views is None else views

    @classmethod
    def of(cls, handles: Sequence[Handle], sizes: Sequence[int]) -> "Shards":
        """Return the shards of handles that have `sizes` rows."""
        return cls(handles, list(accumulate(sizes, initial=0)))

    def choose(self, rows: RowIndex) -> "Shards":
        """Return the same handles with the rows `rows` of the selected ones."""
        return Shards(self.handles, self.starts, compose(self.rows, rows, self.starts[-1]), self.views)

    def narrow(self) -> "Shards":
        """Return the same rows without the handles that hold none of them; at least one handle remains."""
        rows, starts = self.rows, self.starts
        rows = as_slice_if_contiguous(rows) if isinstance(rows, np.ndarray) else rows
        if rows is None:
            return self
        if isinstance(rows, slice):
            begin, end = rows.start, max(rows.start, rows.stop)
            first, last = _handles_between(starts, begin, end)
            base = starts[first]
            is_whole = (begin, end) == (base, starts[last])
            kept = [start - base for start in starts[first : last + 1]]
            inside = None if is_whole else slice(begin - base, end - base)
            return Shards(self.handles[first:last], kept, inside, self.views[first:last])
        part_of = _handle_of(starts, rows)
        used, place = np.unique(part_of, return_inverse=True)
        if not len(used):
            return Shards(self.handles[:1], starts[:2], slice(0, 0), self.views[:1])
        edges = np.asarray(starts)
        begins = np.concatenate([[0], np.cumsum((edges[1:] - edges[:-1])[used])])
        moved = rows - edges[part_of] + begins[place]
        return Shards([self.handles[i] for i in used], begins.tolist(), moved, [self.views[i] for i in used])

    def read(self, columns: Columns, pad_token_id: int | None = None) -> DataProto:
        """Return the named columns of the selected rows. `pad_token_id` is used if the handles' meta_info has none."""
        selections, order = _rows_by_handle(self.starts, self.rows)
        is_shared, parts = len(selections) > 1, []
        for number, rows in selections:
            view, handle = self.views[number], self.handles[number]
            stored = tuple(dict.fromkeys(map(view.stored_name, columns))) if view.names else columns
            part = handle.read(stored, rows, shared=is_shared)
            expected = self.starts[number + 1] - self.starts[number]
            if rows is None and len(part) != expected and names_of(part):
                raise BatchError(f"the future declares {self.starts[-1]} rows, but part {number} has {len(part)}.")
            if view is not PLAIN:
                part = with_names(part, {column: view.stored_name(column) for column in columns})
                part = part._unchecked(
                    part.batch, part.non_tensor_batch, view.meta_info(part.meta_info), part.auto_padding
                )
            parts.append(part)
        batch = concat_batches(parts, are_checked=True, pad_token_id=pad_token_id)
        return batch if order is None else batch.select_idxs(order)

    def sources(self, columns: Columns) -> Iterator[tuple[Handle, Columns]]:
        """Iterate over the handles, each with the stored names of the columns."""
        for handle, view in zip(self.handles, self.views, strict=True):
            yield handle, tuple(map(view.stored_name, columns)) if view.names else columns

    def without_excess(self, columns: Columns) -> "Shards":
        """Return shards for sending: batches of this process reduced to these columns and the selected rows."""
        if not any(type(handle) is HeldBatch for handle in self.handles):
            return self
        selections, order = _rows_by_handle(self.starts, self.rows)
        parts = [self._reduced(number, rows, columns) for number, rows in selections]
        whole = parts[0] if len(parts) == 1 else Shards.concat(parts)
        return whole if order is None else whole.choose(order)

    def _reduced(self, number: int, rows: RowIndex, columns: Columns) -> "Shards":
        handle, size, view = self.handles[number], self.starts[number + 1] - self.starts[number], self.views[number]
        if type(handle) is HeldBatch:
            stored = tuple(dict.fromkeys(map(view.stored_name, columns)))
            return Shards([HeldBatch(handle.read(stored, rows))], [0, count_rows_of(rows, size)], None, [view])
        return Shards([handle], [0, size], rows, [view])

    def with_views(self, change: Callable[[View], View]) -> "Shards":
        """Return the same rows with `change` applied to the views."""
        changed = {id(view): change(view) for view in self.views}
        return Shards(self.handles, self.starts, self.rows, [changed[id(view)] for view in self.views])

    def with_handles(self, change: Callable[[Handle], Any]) -> "Shards":
        """Return the same rows with `change` applied to the handles."""
        return Shards([change(handle) for handle in self.handles], self.starts, self.rows, self.views)

    def is_same(self, other: "Shards") -> bool:
        """Return whether both select the same rows of the same handles, regardless of meta_info."""
        if self is other:
            return True
        one, two = self.narrow(), other.narrow()
        same_handles = [id(handle) for handle in one.handles] == [id(handle) for handle in two.handles]
        same_names = [view.names for view in one.views] == [view.names for view in two.views]
        return same_handles and same_names and is_same_index(one.rows, two.rows)

    @staticmethod
    def concat(parts: "Sequence[Shards]") -> "Shards":
        """Return the rows of all parts, in order."""
        narrow = [part.narrow() for part in parts]
        ends = list(accumulate((part.starts[-1] for part in narrow), initial=0))
        starts = [0, *(start + end for part, end in zip(narrow, ends, strict=False) for start in part.starts[1:])]
        rows: RowIndex = None
        if any(part.rows is not None for part in narrow):
            rows = np.concatenate(
                [_row_numbers(part) + end for part, end in zip(narrow, ends, strict=False)], dtype=np.int64
            )
        handles = [handle for part in narrow for handle in part.handles]
        return Shards(handles, starts, rows, [view for part in narrow for view in part.views])


def _row_numbers(shards: Shards) -> np.ndarray:
    rows = shards.rows
    if isinstance(rows, np.ndarray):
        return rows
    return np.arange(shards.starts[-1])[slice(None) if rows is None else rows]


def _handles_between(starts: Sequence[int], begin: int, end: int) -> tuple[int, int]:
    """Return the range of handles with a row in `begin:end`, at least one handle."""
    first = min(bisect_right(starts, begin) - 1, len(starts) - 2)
    return first, max(bisect_left(starts, end), first + 1)


def _handle_of(starts: Sequence[int], rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.asarray(starts), rows, side="right") - 1


def _rows_by_handle(starts: Sequence[int], rows: RowIndex) -> tuple[list[HandleRows], np.ndarray | None]:
    """Return the rows to read from each handle, and the order to sort them by afterwards (None: already sorted)."""
    if rows is None:
        return [(number, None) for number in range(len(starts) - 1)], None
    if isinstance(rows, slice):
        begin, end = rows.start, max(rows.start, rows.stop)
        selections: list[HandleRows] = []
        for number in range(*_handles_between(starts, begin, end)):
            start, stop = starts[number], starts[number + 1]
            first, last = max(begin, start), min(end, stop)
            if first < last:
                selections.append(
                    (number, None if (first, last) == (start, stop) else slice(first - start, last - start))
                )
        return selections or [(0, slice(0, 0))], None
    part_of = _handle_of(starts, rows)
    order = np.argsort(part_of, kind="stable")
    selections = [(number, rows[part_of == number] - starts[number]) for number in np.unique(part_of).tolist()]
    in_order = bool((order[1:] > order[:-1]).all())
    return selections or [(0, slice(0, 0))], None if in_order else np.argsort(order)
