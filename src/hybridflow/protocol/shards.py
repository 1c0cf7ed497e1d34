"""`Shards`: the handles that hold the rows of some columns, one after another, and the rows that are meant.

Choosing rows changes the index alone. Reading asks each handle for no more than the rows that are meant.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hybridflow.errors import BatchError
from hybridflow.protocol.concat import concat_batches
from hybridflow.protocol.handle import Columns, Handle, HeldBatch, names_of, with_names
from hybridflow.protocol.row_index import RowIndex, as_slice_if_contiguous, compose, count_rows_of, is_same_index

if TYPE_CHECKING:
    from hybridflow.protocol.data_proto import DataProto

Piece = tuple[int, RowIndex]
"""Rows of one handle, by its number."""


class View(NamedTuple):
    """How a handle is seen: `names[new]` is the name there of a column that goes by another one; of its meta_info the
    `kept` keys count (None: all), but none of the `skipped` ones."""

    names: Mapping[str, str] = {}
    kept: frozenset[str] | None = None
    skipped: frozenset[str] = frozenset()

    def there(self, column: str) -> str:
        """Return the name of a column in the handle."""
        return self.names.get(column, column)

    def meta_info(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return what counts of a meta_info."""
        if self.kept is None and not self.skipped:
            return found
        kept = found if self.kept is None else self.kept
        return {key: value for key, value in found.items() if key in kept and key not in self.skipped}


PLAIN = View()


class Shards:
    """`starts` are the first rows of the handles, then the number of all rows; `rows` are meant of these. `views` are
    those of the handles."""

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
        """Return the shards of handles with so many rows each."""
        return cls(handles, list(accumulate(sizes, initial=0)))

    def choose(self, rows: RowIndex) -> "Shards":
        """Return the same handles with other rows: `rows` of those that are meant now."""
        return Shards(self.handles, self.starts, compose(self.rows, rows, self.starts[-1]), self.views)

    def narrow(self) -> "Shards":
        """Return the same rows, without the handles that hold none of them; one handle at least."""
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

    def read(self, columns: Columns, pad_token_id: int | None = None) -> "DataProto":
        """Return the named columns of the rows that are meant. `pad_token_id` is used where the handles give none."""
        pieces, order = _pieces(self.starts, self.rows)
        is_shared, parts = len(pieces) > 1, []
        for number, rows in pieces:
            view, handle = self.views[number], self.handles[number]
            there = tuple(dict.fromkeys(map(view.there, columns))) if view.names else columns
            part = handle.read(there, rows, shared=is_shared)
            expected = self.starts[number + 1] - self.starts[number]
            if rows is None and len(part) != expected and names_of(part):
                raise BatchError(f"the future declared {self.starts[-1]} rows, but part {number} has {len(part)}.")
            if view is not PLAIN:
                part = with_names(part, {column: view.there(column) for column in columns})
                part = part._of_own(
                    part.batch, part.non_tensor_batch, view.meta_info(part.meta_info), part.auto_padding
                )
            parts.append(part)
        batch = concat_batches(parts, are_checked=True, pad_token_id=pad_token_id)
        return batch if order is None else batch.select_idxs(order)

    def sources(self, columns: Columns) -> Iterator[tuple[Handle, Columns]]:
        """Iterate over the handles, each with the names there of columns."""
        for handle, view in zip(self.handles, self.views, strict=True):
            yield handle, tuple(map(view.there, columns)) if view.names else columns

    def without_excess(self, columns: Columns) -> "Shards":
        """Return shards whose batches of this process hold these columns and the rows that are meant: to be sent."""
        if not any(type(handle) is HeldBatch for handle in self.handles):
            return self
        pieces, order = _pieces(self.starts, self.rows)
        parts = [self._piece(number, rows, columns) for number, rows in pieces]
        whole = parts[0] if len(parts) == 1 else Shards.concat(parts)
        return whole if order is None else whole.choose(order)

    def _piece(self, number: int, rows: RowIndex, columns: Columns) -> "Shards":
        handle, size, view = self.handles[number], self.starts[number + 1] - self.starts[number], self.views[number]
        if type(handle) is HeldBatch:
            there = tuple(dict.fromkeys(map(view.there, columns)))
            return Shards([HeldBatch(handle.read(there, rows))], [0, count_rows_of(rows, size)], None, [view])
        return Shards([handle], [0, size], rows, [view])

    def with_views(self, change: Callable[[View], View]) -> "Shards":
        """Return the same rows of handles that are seen differently."""
        changed = {id(view): change(view) for view in self.views}
        return Shards(self.handles, self.starts, self.rows, [changed[id(view)] for view in self.views])

    def with_handles(self, change: Callable[[Handle], Any]) -> "Shards":
        """Return the same rows of other handles: `change(handle)` of each."""
        return Shards([change(handle) for handle in self.handles], self.starts, self.rows, self.views)

    def is_same(self, other: "Shards") -> bool:
        """Return whether both mean the same rows of the same handles, whatever counts of their meta_info."""
        if self is other:
            return True
        one, two = self.narrow(), other.narrow()
        same_handles = [id(handle) for handle in one.handles] == [id(handle) for handle in two.handles]
        same_names = [view.names for view in one.views] == [view.names for view in two.views]
        return same_handles and same_names and is_same_index(one.rows, two.rows)

    @staticmethod
    def concat(parts: "Sequence[Shards]") -> "Shards":
        """Return the rows of all parts, one after another."""
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
    """Return the first handle with a row of `begin:end`, and the one after the last; one handle at least."""
    first = min(bisect_right(starts, begin) - 1, len(starts) - 2)
    return first, max(bisect_left(starts, end), first + 1)


def _handle_of(starts: Sequence[int], rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.asarray(starts), rows, side="right") - 1


def _pieces(starts: Sequence[int], rows: RowIndex) -> tuple[list[Piece], np.ndarray | None]:
    """Return which rows to read of which handles, and how to order them then (None: as they come)."""
    if rows is None:
        return [(number, None) for number in range(len(starts) - 1)], None
    if isinstance(rows, slice):
        begin, end = rows.start, max(rows.start, rows.stop)
        pieces: list[Piece] = []
        for number in range(*_handles_between(starts, begin, end)):
            start, stop = starts[number], starts[number + 1]
            first, last = max(begin, start), min(end, stop)
            if first < last:
                pieces.append((number, None if (first, last) == (start, stop) else slice(first - start, last - start)))
        return pieces or [(0, slice(0, 0))], None
    part_of = _handle_of(starts, rows)
    order = np.argsort(part_of, kind="stable")
    pieces = [(number, rows[part_of == number] - starts[number]) for number in np.unique(part_of).tolist()]
    in_order = bool((order[1:] > order[:-1]).all())
    return pieces or [(0, slice(0, 0))], None if in_order else np.argsort(order)
