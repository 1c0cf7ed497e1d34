"""`Handle`: a reference to the result of one rank. Futures read handles; each backend has its own class.

`HeldBatch` is the handle of a batch in this process.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from tensordict import TensorDict

from hybridflow.protocol.batch import require_names, tensors_of
from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.meta_info import copy_structure
from hybridflow.protocol.rows import RowIndex, count_rows_of, take_rows

Columns = tuple[str, ...]


class Duration:
    """The duration of a call on its worker, in seconds, and its end by `time.time()`; None until they are known."""

    __slots__ = ("ended", "seconds")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.ended: float | None = None

    def note(self, start: float, end: float) -> None:
        """Record that the call ran from `start` to `end`."""
        self.seconds, self.ended = end - start, end


class Handle(Protocol):
    """A reference to the result of a call on one rank, possibly not computed yet, or to a stored value.

    The value is freed when the handle is released or garbage collected. `where` is the method that produces it, "" for
    the controller; `duration` is that of the call. `others` are handles of the same call that this one represents:
    they must have succeeded before it is read. The defaults are those of a batch in this process.
    """

    where: str = ""
    duration: Duration
    others: "Sequence[Handle]" = ()

    @property
    def produced(self) -> Columns:
        """The columns of a batch that is already computed."""
        return ()

    def get(self) -> Any:
        """Wait for the value and return a private copy. Raises the error of the call."""
        ...

    def read(self, columns: Columns | None, rows: RowIndex, *, shared: bool = False) -> DataProto:
        """Wait for a batch and return some columns and rows. Raises BatchError if the value is not a batch.

        `shared`: the result may be a view of the store's memory, for a reader that copies it.
        """
        ...

    @staticmethod
    def wait_for(handles: "Sequence[Any]") -> None:
        """Wait for several handles of this class at once. Raises the error of a call."""

    def release(self) -> None:
        """Free the value; reading it afterwards is an error."""


class HeldBatch(Handle):
    """The handle of a batch in this process."""

    def __init__(self, batch: DataProto) -> None:
        self.batch, self.duration = batch, Duration()

    @property
    def produced(self) -> Columns:
        """The columns of the batch."""
        return tuple(names_of(self.batch))

    def get(self) -> DataProto:
        """Return the batch itself."""
        return self.batch

    def read(self, columns: Columns | None, rows: RowIndex, *, shared: bool = False) -> DataProto:
        """Return columns and rows of the batch; see `take`."""
        return take(self.batch, columns, rows)


def wait_for(handles: Iterable[Any]) -> None:
    """Wait for handles and those that they represent, all of one class at once. Raises the error of a call."""
    kinds: dict[type, list[Any]] = {}
    for handle in handles:
        for each in (handle, *handle.others):
            kinds.setdefault(type(each), []).append(each)
    for kind, of_kind in kinds.items():
        kind.wait_for(of_kind)  # pyright: ignore[reportAttributeAccessIssue]


def take(data: DataProto, columns: Columns | None = None, rows: RowIndex = None) -> DataProto:
    """Return columns and rows of a batch (None: all); the batch itself if nothing is left out."""
    names = names_of(data)
    if columns is not None and list(columns) == names:
        columns = None
    if columns is None and (rows is None or (data.batch is None and not names)):
        return data
    chosen = names if columns is None else columns
    require_names(chosen, names, "the future")
    tensors, arrays = tensors_of(data.batch), data.non_tensor_batch
    own_tensors = {name: _rows_of(tensors[name], rows) for name in chosen if name in tensors}
    own_arrays = {name: _rows_of(arrays[name], rows) for name in chosen if name in arrays}
    batch = data.batch
    if batch is not None:
        batch = TensorDict(own_tensors, [count_rows_of(rows, len(data))], device=batch.device)
    return data._unchecked(batch, own_arrays, copy_structure(data.meta_info), data.auto_padding)


def _rows_of(column: Any, rows: RowIndex) -> Any:
    if rows is None:
        return column
    return take_rows(column, rows) if isinstance(rows, np.ndarray) else column[rows]


def with_names(data: DataProto, names: Mapping[str, str]) -> DataProto:
    """Return the columns `names[new]` of a batch as `new`; a column with two names is copied for the second one."""
    if all(new == old for new, old in names.items()):
        return data
    tensors, arrays, used = tensors_of(data.batch), data.non_tensor_batch, set()
    own_tensors, own_arrays = {}, {}
    for new, old in names.items():
        if old in tensors:
            own_tensors[new] = tensors[old].clone() if old in used else tensors[old]
        else:
            own_arrays[new] = copy.deepcopy(arrays[old]) if old in used else arrays[old]
        used.add(old)
    batch = data.batch
    if batch is not None:
        batch = TensorDict(own_tensors, batch.batch_size, device=batch.device)
    return data._unchecked(batch, own_arrays, data.meta_info, data.auto_padding)


def names_of(data: DataProto) -> list[str]:
    """Return the names of all columns, tensors first."""
    return [*(() if data.batch is None else data.batch.keys()), *data.non_tensor_batch]  # pyright: ignore
