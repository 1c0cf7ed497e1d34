"""`RowIndex`: a selection of rows of a batch, and the composition of two selections."""

import numpy as np

RowIndex = slice | np.ndarray | None
"""A slice without a step, an array of row numbers, or None for all rows."""


def count_rows_of(rows: RowIndex, num_rows: int) -> int:
    """Return how many of `num_rows` rows are selected."""
    if rows is None:
        return num_rows
    return len(range(num_rows)[rows]) if isinstance(rows, slice) else len(rows)


def compose(first: RowIndex, second: RowIndex, num_rows: int) -> RowIndex:
    """Return the index of the rows `second` of the rows `first` of a batch of `num_rows` rows."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, np.ndarray):
        return first[second]
    if isinstance(second, np.ndarray):
        return second + (first.start or 0)
    chosen = range(num_rows)[first][second]
    return slice(chosen.start, max(chosen.start, chosen.stop))


def is_same_index(first: RowIndex, second: RowIndex) -> bool:
    """Return whether both select the same rows in the same form."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return type(first) is type(second) and np.array_equal(first, second)  # pyright: ignore[reportArgumentType]
    return first == second


def as_slice_if_contiguous(rows: np.ndarray) -> slice | np.ndarray:
    """Return consecutive ascending rows as a slice, which is read without a copy, and other rows unchanged."""
    count = len(rows)
    if count and int(rows[-1]) - int(rows[0]) == count - 1 and (count < 3 or bool((np.diff(rows) == 1).all())):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows
