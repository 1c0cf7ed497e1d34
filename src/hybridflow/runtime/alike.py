"""Whether a stored state has the structure of another one, before any of it is used."""

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import CheckpointError


def require_alike(stored: Any, wanted: Any, place: str) -> None:
    """Raise CheckpointError, naming the part, unless a stored value has the keys, types, dtypes and shapes of another.

    Further keys are allowed, and None in place of a number.
    """
    if isinstance(wanted, Mapping) and isinstance(stored, Mapping):
        for key, value in wanted.items():
            if key not in stored:
                raise CheckpointError(f"{place} has no '{key}'; hybridflow did not write it.")
            require_alike(stored[key], value, f"{place}['{key}']")
    elif stored is not None and wanted is not None and (found := _kind(stored)) != (expected := _kind(wanted)):
        raise CheckpointError(f"{place} is {found}, but {expected} is expected; hybridflow did not write it.")


def _kind(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"
