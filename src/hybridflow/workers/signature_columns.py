"""An algorithm function's signature is the declaration of what it reads: columns are keyword arguments named as in
the glossary, everything else is a parameter named as its configuration key."""

import inspect
from collections.abc import Callable
from typing import Any

from hybridflow.protocol import FIELDS


def columns_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The batch columns that a function takes."""
    return tuple(name for name in inspect.signature(function).parameters if name in FIELDS)


def parameters_of(function: Callable[..., Any], section: Any) -> dict[str, Any]:
    """The function's other arguments that are keys of a configuration section, with their values."""
    names = inspect.signature(function).parameters
    return {name: getattr(section, name) for name in names if name in type(section).model_fields}
