"""The producers of the columns that a call reads, from the handles in its arguments: the edges of the dataflow."""

from collections.abc import Iterable, Iterator
from typing import Any

from hybridflow.controller.columns import columns_of
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.runtime.observe.trace import CONTROLLER, Sources


def sources_of(values: Iterable[Any]) -> Sources:
    """Return (producer, columns) pairs of the arguments, in order of first occurrence.

    An argument is a batch of the controller, a narrowed future, a handle, a list of these, or another value (ignored).
    """
    found: dict[str, dict[str, None]] = {}
    for value in values:
        for producer, columns in _producers(value):
            if columns:
                found.setdefault(producer or CONTROLLER, {}).update(dict.fromkeys(columns))
    return tuple((producer, tuple(columns)) for producer, columns in found.items())


def _producers(value: Any) -> Iterator[tuple[str, Iterable[str]]]:
    if isinstance(value, DataProto):
        yield CONTROLLER, columns_of(value)
    elif isinstance(value, DataProtoFuture):
        for handle, columns in value.sources():
            yield handle.where, columns
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _producers(element)
    elif hasattr(value, "produced"):
        yield value.where, value.produced


def produced_columns(value: Any) -> tuple[str, ...]:
    """Return the columns of a value; empty if it is not a batch."""
    return tuple(columns_of(value)) if isinstance(value, DataProto) else ()
