"""`Batch`: the containers of a batch and the check that they agree, with errors that name the column at fault."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol.meta_info import copy_structure

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


@dataclass(eq=False, repr=False)
class Batch:
    """The columns of some rows, and `meta_info` on all of them; `DataProto` adds the operations."""

    batch: TensorDict = None  # pyright: ignore[reportAssignmentType]
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    auto_padding: bool = False

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()
        self.batch = None if self.batch is None else self.batch.copy()  # pyright: ignore[reportAttributeAccessIssue]
        self.non_tensor_batch = dict(self.non_tensor_batch)
        self.meta_info = copy_structure(self.meta_info)

    @classmethod
    def _unchecked(
        cls, batch: TensorDict | None, non_tensor_batch: dict[str, np.ndarray], meta_info: dict, auto_padding: bool
    ) -> Self:
        """Return a batch of consistent containers that have no other reference, without a check or a copy."""
        if (cls.__init__, cls.__post_init__) != (Batch.__init__, Batch.__post_init__):
            return cls(batch, non_tensor_batch, meta_info, auto_padding)  # pyright: ignore[reportArgumentType]
        made = cls.__new__(cls)
        made.batch, made.non_tensor_batch = batch, non_tensor_batch  # pyright: ignore[reportAttributeAccessIssue]
        made.meta_info, made.auto_padding = meta_info, auto_padding
        return made

    def check_consistency(self) -> None:
        """Raise BatchError or FieldError unless every column is well formed and has the same number of rows.

        Called on construction and by every operation.
        """
        count_rows(self.batch, self.non_tensor_batch, self.meta_info)

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def get_data_info(self) -> str:
        """Return a printable summary: one line per column or key, with shape, dtype and device, or type."""
        lines = ["batch"]
        lines += [f"  {name}: {tuple(t.shape)} ({t.dtype}) {t.device}" for name, t in tensors_of(self.batch).items()]
        lines += ["non_tensor_batch"]
        lines += [f"  {name}: {_kind(array)}" for name, array in self.non_tensor_batch.items()]
        lines += ["meta_info"]
        lines += [f"  {key}: {_kind(value)}" for key, value in self.meta_info.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self)} rows\n{self.get_data_info()}"


Batches = TypeVar("Batches", bound=Batch)


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


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    if isinstance(value, list):
        return f"list[{'|'.join(sorted({_kind(item) for item in value[:3]})) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(_kind(item) for item in value)})"
    if isinstance(value, dict) and value:
        key, item = next(iter(value.items()))
        return f"dict[{_kind(key)}: {_kind(item)}]"
    return type(value).__name__
