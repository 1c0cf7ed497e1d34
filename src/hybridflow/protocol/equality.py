"""Equality of contents. NaN equals NaN in tensors, numpy arrays and numbers inside objects."""

import numbers
from typing import Any

import numpy as np
import torch

_Pairs = frozenset[tuple[int, int]]


def is_equal(first: Any, second: Any, within: _Pairs = frozenset()) -> bool:
    """Return whether two columns, or two values of meta_info, have equal type, shape and contents.

    Objects may contain themselves: a pair that is being compared further out, in `within`, does not decide again.
    """
    if first is second:
        return True
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and _tensors_equal(first, second)
    if not isinstance(first, np.ndarray | dict | list | tuple):
        if isinstance(first, numbers.Number) and isinstance(second, numbers.Number):
            return bool(first == second) or bool(first != first and second != second)
        return not isinstance(second, np.ndarray) and bool(first == second)
    if (pair := (id(first), id(second))) in within:
        return True
    within |= {pair}
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and _arrays_equal(first, second, within)
    if isinstance(first, dict):
        if not isinstance(second, dict):
            return not isinstance(second, np.ndarray) and bool(first == second)
        return first.keys() == second.keys() and all(is_equal(v, second[key], within) for key, v in first.items())
    if not isinstance(second, list | tuple):
        return not isinstance(second, np.ndarray) and bool(first == second)
    return (
        isinstance(first, list) == isinstance(second, list)
        and len(first) == len(second)
        and all(is_equal(mine, theirs, within) for mine, theirs in zip(first, second, strict=True))
    )


def _tensors_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    second = second.to(first.device)
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return True
    if torch.equal(first, second):
        return True
    if not (first.is_floating_point() or first.is_complex()):
        return False
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _arrays_equal(first: np.ndarray, second: np.ndarray, within: _Pairs) -> bool:
    both_strings = first.dtype.kind == second.dtype.kind == "U"
    if first.shape != second.shape or (first.dtype != second.dtype and not both_strings):
        return False
    if first.dtype.kind == "O":
        return all(is_equal(mine, theirs, within) for mine, theirs in zip(first.flat, second.flat, strict=True))
    return np.array_equal(first, second, equal_nan=first.dtype.kind in "fcmM")
