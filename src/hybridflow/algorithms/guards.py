"""Input checks of this package: wrong shapes, types and ranges raise an `AlgorithmError` with both values.

Checks read shapes and Python numbers only, so they need no device synchronization; the few that read contents do so
only if that is free (see `is_free_to_read`).
"""

import math

import torch
from torch import Tensor

from hybridflow.errors import AlgorithmConfigError, AlgorithmError


def require_columns(function: str, layout: str = "(batch, response_len)", **columns: Tensor) -> None:
    """Raise unless all columns are floating point and have one shape, with as many axes as `layout` names."""
    num_axes = layout.count(",") + 1
    (first, reference), *others = columns.items()
    if reference.dim() != num_axes:
        raise AlgorithmError(f"{function}: {first} has shape {tuple(reference.shape)}; it must be {layout}.")
    for name, column in others:
        if column.shape != reference.shape:
            raise AlgorithmError(
                f"{function}: {name} has shape {tuple(column.shape)}, but {first} has shape "
                f"{tuple(reference.shape)}; both must be {layout}."
            )
    for name, column in columns.items():
        if not column.is_floating_point():
            raise AlgorithmError(f"{function}: {name} is {column.dtype}; it must be floating point, call .float().")


def require_mask(function: str, name: str, mask: Tensor, shape: tuple[int, ...], like: str) -> None:
    """Raise unless `mask` is boolean and has `shape`, the shape of the column called `like`."""
    if mask.shape != shape:
        raise AlgorithmError(
            f"{function}: {name} has shape {tuple(mask.shape)}, but {like} has shape {tuple(shape)}; "
            "the mask marks which values count, so both must be equal."
        )
    if mask.dtype != torch.bool:
        raise AlgorithmError(f"{function}: {name} is {mask.dtype}; it must be torch.bool, call .bool().")


def require_in_range(
    function: str, name: str, value: object, *, minimum: float, maximum: float = math.inf, above_minimum: bool = False
) -> None:
    """Raise unless `value` is a finite number within [minimum, maximum]; `above_minimum` excludes the minimum."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        lowest_is_allowed = not above_minimum or value != minimum
        if minimum <= value <= maximum and lowest_is_allowed:
            return
    lower = f"above {minimum}" if above_minimum else f"at least {minimum}"
    upper = "" if maximum == math.inf else f" and at most {maximum}"
    raise AlgorithmConfigError(f"{function}: {name}={value!r} is out of range; it must be a number {lower}{upper}.")


def require_count(function: str, name: str, value: object, minimum: int) -> None:
    """Raise unless `value` is an int of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise AlgorithmConfigError(
            f"{function}: {name}={value!r} is not valid; it must be an int of at least {minimum}."
        )


def require_name(function: str, what: str, name: str, table: dict) -> None:
    """Raise unless `name` is a key of `table`."""
    if name not in table:
        raise AlgorithmConfigError(f"{function}: there is no {what} {name!r}; valid are {', '.join(map(repr, table))}.")


def is_free_to_read(tensor: Tensor) -> bool:
    """Return whether the host can read the contents without waiting for a device."""
    return tensor.device.type == "cpu"
