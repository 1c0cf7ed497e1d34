"""Where the columns of a call come from: the edges of the dataflow, told by the handles that its arguments hold."""

from collections.abc import Iterable
from typing import Any

from hybridflow.controller.columns import columns_of
from hybridflow.observability.trace import CONTROLLER, Sources
from hybridflow.protocol import DataProto, DataProtoFuture


class SourceList:
    """Collects producers with their columns, in the order in which they are met."""

    def __init__(self) -> None:
        self._columns: dict[str, dict[str, None]] = {}

    def add(self, producer: str, columns: Iterable[str]) -> None:
        """Columns that a producer made."""
        self._columns.setdefault(producer, {}).update(dict.fromkeys(columns))

    def add_value(self, value: Any) -> None:
        """What an argument holds: a batch of the controller, a future that was narrowed, a handle, a list of them."""
        if isinstance(value, DataProto):
            self.add(CONTROLLER, columns_of(value))
        elif isinstance(value, DataProtoFuture):
            for handle, columns in value.sources():
                self.add_handle(handle, columns)
        elif isinstance(value, list | tuple):
            for element in value:
                self.add_value(element)
        elif hasattr(value, "produced"):
            self.add_handle(value, value.produced)

    def add_handle(self, handle: Any, columns: Iterable[str]) -> None:
        """Some columns of what a handle stands for."""
        handle = getattr(handle, "handle", handle)  # of a rank that speaks for others
        self.add(getattr(handle, "where", "") or CONTROLLER, columns)

    def as_tuple(self) -> Sources:
        """(producer, columns) of each, those without columns left out."""
        return tuple((producer, tuple(columns)) for producer, columns in self._columns.items() if columns)


def produced_columns(value: Any) -> tuple[str, ...]:
    """The columns of a value that is kept, if it is a batch."""
    return tuple(columns_of(value)) if isinstance(value, DataProto) else ()
