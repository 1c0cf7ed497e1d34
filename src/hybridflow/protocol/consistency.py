"""Consistency checks of a batch, with errors that name the column at fault."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from tensordict import TensorDictBase

from hybridflow.errors import BatchError, FieldError

Column = torch.Tensor | np.ndarray
Names = str | Iterable[str] | None


def as_names(names: Names) -> list[str]:
    """Return one name, several or none as a list without repetitions."""
    if names is None:
        return []
    return [names] if isinstance(names, str) else list(dict.fromkeys(names))


def require_names(wanted: Iterable[str], present: Iterable[str], where: str) -> None:
    """Raise FieldError unless every wanted name is present; `where` names the searched object in the message."""
    present = list(present)
    missing = [name for name in wanted if name not in present]
    if missing:
        raise FieldError(f"{where} has no {_listed(missing)}; it has {_listed(present)}.")


def tensors_of(batch: TensorDictBase | None) -> dict[str, torch.Tensor]:
    """Return the tensor columns as a plain dict."""
    return {} if batch is None else dict(batch.items())  # pyright: ignore[reportReturnType]


def count_rows(batch: TensorDictBase | None, non_tensor_batch: dict, meta_info: dict) -> int | None:
    """Check the three parts of a batch and return its number of rows; None if it has no columns at all."""
    if batch is not None:
        _check_tensors(batch)
    if not isinstance(non_tensor_batch, dict) or not isinstance(meta_info, dict):
        raise BatchError(
            f"non_tensor_batch and meta_info must be dicts, got {type(non_tensor_batch).__name__} and "
            f"{type(meta_info).__name__}."
        )
    num_rows = None if batch is None else batch.batch_size[0]
    for name, array in non_tensor_batch.items():
        _check_array(name, array)
        if num_rows is None:
            num_rows = len(array)
        if len(array) != num_rows:
            raise BatchError(
                "all columns of a batch need the same number of rows, but it has "
                + describe({**tensors_of(batch), **non_tensor_batch})
            )
    twice = [] if batch is None else [name for name in non_tensor_batch if name in batch.keys()]  # noqa: SIM118
    if twice:
        raise FieldError(f"{_listed(twice)} is in both batch and non_tensor_batch; rename or drop one of the two.")
    return num_rows


def describe(columns: Mapping[str, Column]) -> str:
    """Return names with shapes, for an error message."""
    return ", ".join(f"{name} {tuple(column.shape)}" for name, column in columns.items()) or "no columns"


def _check_tensors(batch: TensorDictBase) -> None:
    if not isinstance(batch, TensorDictBase):
        raise BatchError(f"batch must be a TensorDict, got {type(batch).__name__}; use DataProto.from_dict.")
    if len(batch.batch_size) != 1:
        raise BatchError(
            f"batch must have exactly one batch dimension, got batch_size={list(batch.batch_size)}; "
            "use TensorDict(tensors, batch_size=[num_rows])."
        )
    for name, column in batch.items():
        if not isinstance(name, str) or not isinstance(column, torch.Tensor):
            raise FieldError(
                f"batch[{name!r}] is a {type(column).__name__}, but batch maps str to tensors; "
                "DataProto.from_tensordict sorts non-tensor data into non_tensor_batch and meta_info."
            )
        if column.is_nested or column.layout != torch.strided or column.is_quantized:
            raise FieldError(
                f"batch[{name!r}] is nested, sparse or quantized; columns must be dense tensors: pad, densify or "
                f"dequantize it."
            )


def _check_array(name: str, array: np.ndarray) -> None:
    if not isinstance(name, str):
        raise FieldError(f"non_tensor_batch has the key {name!r}; the name of a column must be a str.")
    if not isinstance(array, np.ndarray):
        raise FieldError(
            f"non_tensor_batch[{name!r}] is a {type(array).__name__}; it must be a numpy array "
            "(DataProto.from_dict converts lists)."
        )
    if isinstance(array, np.ma.MaskedArray):
        raise FieldError(
            f"non_tensor_batch[{name!r}] is a masked array, whose mask would be lost; fill it (.filled())."
        )
    if array.ndim == 0:
        raise FieldError(f"non_tensor_batch[{name!r}] has no dimension; the first dimension must be the rows.")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
