"""Selection and repetition of rows of one column, a tensor or a numpy array, and the index that selects them."""

import operator
from typing import Any

import numpy as np
import torch

from hybridflow.errors import BatchError
from hybridflow.protocol.batch import Column

RowIndex = slice | np.ndarray | None
"""A slice without a step, an array of row numbers, or None for all rows."""


class RowIndexError(BatchError, IndexError):
    """The error for a row number out of range."""


def as_count(value: Any, name: str, minimum: int) -> int:
    """Return an integer argument of at least `minimum`. Raises BatchError with the name of the argument."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise BatchError(f"{name}={value!r} is invalid: must be an integer.")
    count = operator.index(value)
    if count < minimum:
        raise BatchError(f"{name}={count} is invalid: must be at least {minimum}.")
    return count


def is_single_row(index: Any) -> bool:
    """Return whether an index means one row: an integer of Python, numpy or torch."""
    if isinstance(index, torch.Tensor):
        return index.ndim == 0 and index.dtype != torch.bool and not index.dtype.is_floating_point
    if isinstance(index, np.ndarray):
        return index.ndim == 0 and index.dtype.kind in "iu"
    return isinstance(index, int | np.integer) and not isinstance(index, bool)


def row_indices(index: Any, num_rows: int) -> np.ndarray:
    """Return row numbers in [0, num_rows) as int64 from integers (negative: from the end) or one bool per row."""
    rows = _as_array(index)
    if rows.ndim != 1 or rows.dtype.kind not in "iub":
        raise BatchError(
            f"rows must be selected by an int, a slice, a list, or a 1-dimensional array of integers or bools; "
            f"got {_described(index)}."
        )
    if rows.dtype.kind == "b":
        if len(rows) != num_rows:
            raise BatchError(f"a bool mask needs one entry per row: it has {len(rows)}, the batch has {num_rows} rows.")
        return np.flatnonzero(rows)
    rows = rows.astype(np.int64, copy=False)
    outside = rows[(rows < -num_rows) | (rows >= num_rows)]
    if outside.size:
        raise RowIndexError(f"row {outside[0]} is not in a batch of {num_rows} rows; {_valid(num_rows)}.")
    return np.where(rows < 0, rows + num_rows, rows)


def take_rows(column: Column, rows: np.ndarray) -> Column:
    """Return a copy of the selected rows."""
    if isinstance(column, torch.Tensor):
        return column.index_select(0, torch.from_numpy(rows).to(column.device))
    return column[rows]


def repeat_rows(column: Column, times: int, interleave: bool) -> Column:
    """Return every row `times` times: each row in succession if `interleave`, otherwise the whole column repeated."""
    num_rows = column.shape[0]
    if isinstance(column, torch.Tensor):
        new_axis, expanded = (1, (num_rows, times)) if interleave else (0, (times, num_rows))
        rest = column.shape[1:]
        if times == 1:
            return column.clone()
        return column.unsqueeze(new_axis).expand(*expanded, *rest).reshape(num_rows * times, *rest)
    return np.repeat(column, times, axis=0) if interleave else np.tile(column, (times,) + (1,) * (column.ndim - 1))


def _as_array(index: Any) -> np.ndarray:
    if isinstance(index, torch.Tensor):
        return np.asarray(None) if index.is_floating_point() else index.detach().cpu().numpy()
    if isinstance(index, list | tuple) and not index:
        return np.zeros(0, np.int64)
    try:
        return np.asarray(index)
    except ValueError:  # a ragged list
        return np.asarray(None)


def _valid(num_rows: int) -> str:
    return f"valid are {-num_rows} to {num_rows - 1}" if num_rows else "it is empty"


def _described(index: Any) -> str:
    if isinstance(index, str):
        return f"{index!r} (a column is data.batch[name] or data.non_tensor_batch[name])"
    shape = f" of shape {tuple(index.shape)} and {index.dtype}" if hasattr(index, "shape") else f" {index!r}"
    return type(index).__name__ + shape


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
