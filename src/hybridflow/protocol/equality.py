"""Equality of contents. NaN equals NaN in tensors, numpy arrays and numbers inside objects."""

import numbers
from typing import Any

import numpy as np
import torch


def is_equal(first: Any, second: Any) -> bool:
    """Return whether two columns, or two values of meta_info, have equal type, shape and contents."""
    if first is second:
        return True
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and _tensors_equal(first, second)
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and _arrays_equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return (
            isinstance(first, list) == isinstance(second, list)
            and len(first) == len(second)
            and all(map(is_equal, first, second))
        )
    if isinstance(first, numbers.Number) and isinstance(second, numbers.Number):
        return bool(first == second) or bool(first != first and second != second)
    return bool(first == second)


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


def _arrays_equal(first: np.ndarray, second: np.ndarray) -> bool:
    both_strings = first.dtype.kind == second.dtype.kind == "U"
    if first.shape != second.shape or (first.dtype != second.dtype and not both_strings):
        return False
    if first.dtype.kind == "O":
        return all(map(is_equal, first.flat, second.flat))
    return np.array_equal(first, second, equal_nan=first.dtype.kind in "fcmM")
