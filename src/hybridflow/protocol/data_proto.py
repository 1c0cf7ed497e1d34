"""DataProto, the typed batch that every call between controller and workers carries.

It owns rows: tensor columns, numpy columns, and meta_info on the batch as a whole. It knows the padding rules of the
glossary, but no algorithm and no transport. Operations return a new batch with new dicts, whose tensors may be views of
the old ones; only `pop` and `padding` change the batch they are called on.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import concat, disk_format
from hybridflow.protocol.batch import Batch, Column, Names, count_rows, tensors_of
from hybridflow.protocol.columns import (
    batch_from_tensordict,
    batch_to_tensordict,
    object_column,
    pick,
    rename_columns,
    tensor_columns,
    union_columns,
)
from hybridflow.protocol.meta_info import copy_structure, union_meta_info
from hybridflow.protocol.packed_batch import PackedBatch
from hybridflow.protocol.padding import DataProtoConfig, append_copies
from hybridflow.protocol.rows import as_count, is_single_row, repeat_rows, row_indices, take_rows

_SHUFFLING = ("shuffle", "drop_last")


@runtime_checkable
class Future(Protocol):
    """A batch that is not computed yet, as `union` needs it: `DataProtoFuture`."""

    @staticmethod
    def of(batch: Any) -> Any:
        """Return a batch as a future."""

    def union(self, other: Any) -> Any:
        """Return the columns of both."""


Futures = TypeVar("Futures", bound=Future)


@dataclass(eq=False)
class DataProtoItem:
    """A row: tensors without the batch dimension, entries of the numpy columns, and meta_info of the batch."""

    batch: TensorDict = None  # pyright: ignore[reportAssignmentType]
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto(Batch):
    """A batch of rows.

    `batch` is a TensorDict with exactly one batch dimension, or None; `non_tensor_batch` maps names to numpy arrays
    whose first dimension is the rows; `meta_info` holds values that belong to the whole batch. `concat` aggregates its
    key "metrics", a dict from a name to a number or a list. `auto_padding` lets dispatch pad the
    batch to equal parts. The three containers are copied, their contents are not; None is an empty container. Raises
    BatchError or FieldError if rows do not match.
    """

    # Construction

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | list | tuple] | None = None,
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Return a batch of columns of shape (rows, ...); a list becomes an object array with one entry per row."""
        arrays = {
            name: object_column(values) if isinstance(values, list | tuple) else values
            for name, values in (non_tensors or {}).items()
        }
        return cls(tensor_columns(tensors or {}), arrays, meta_info or {}, auto_padding)  # pyright: ignore

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> "DataProto":
        """Return a batch from one dict of tensors and numpy arrays, sorted by their type."""
        wrong = {name: type(value).__name__ for name, value in data.items() if not isinstance(value, Column)}
        if wrong:
            raise FieldError(f"from_single_dict takes tensors and numpy arrays, got {wrong}.")
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {name: value for name, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDictBase, meta_info: dict[str, Any] | None = None) -> "DataProto":
        """Return a batch from a TensorDict: NonTensorStack becomes a numpy column, NonTensorData a key of meta_info."""
        return batch_from_tensordict(cls, tensor_dict, meta_info)

    def to_tensordict(self) -> TensorDict:
        """Return all contents as one TensorDict, the inverse of `from_tensordict`; `auto_padding` is left out."""
        return batch_to_tensordict(self)

    # Rows

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    @overload
    def __getitem__(self, item: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: slice | Sequence | np.ndarray | torch.Tensor) -> "DataProto": ...
    def __getitem__(self, item: Any) -> "DataProto | DataProtoItem":
        """Return one row for an int, views for a slice, copies for a list, array or tensor of ints or bools."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if not is_single_row(item):
            return self.select_idxs(item)
        self.check_consistency()
        row = int(row_indices([int(item)], len(self))[0])
        batch = None if self.batch is None else self.batch[row]
        arrays = {name: array[row] for name, array in self.non_tensor_batch.items()}
        return DataProtoItem(batch, arrays, copy_structure(self.meta_info))  # pyright: ignore[reportArgumentType]

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """Return the rows `start:end:step` of a Python slice as views, or as copies if the step is negative."""
        try:
            rows = range(len(self))[start:end:step]
        except (TypeError, ValueError) as error:
            raise BatchError(f"slice({start!r}, {end!r}, {step!r}): {error}.") from error
        if rows.step < 0:
            return self.select_idxs(np.arange(len(self))[start:end:step])
        part = slice(rows.start, rows.stop, rows.step)
        return self._map_rows(len(rows), lambda column: column[part])

    def select_idxs(self, idxs: Sequence | np.ndarray | torch.Tensor) -> "DataProto":
        """Return copies of the rows given by integers (negative: from the end) or by one bool per row."""
        rows = row_indices(idxs, len(self))
        return self._map_rows(len(rows), lambda column: take_rows(column, rows))

    def reorder(self, indices: Sequence | np.ndarray | torch.Tensor) -> "DataProto":
        """Return the same rows in another order. Raises BatchError unless `indices` names each row once."""
        rows = row_indices(indices, len(self))
        if len(rows) != len(self) or len(np.unique(rows)) != len(self):
            raise BatchError(
                f"reorder needs each of the {len(self)} rows exactly once, got {len(rows)} indices of which "
                f"{len(np.unique(rows))} are different; use select_idxs to choose some rows."
            )
        return self.select_idxs(rows)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Return every row `repeat_times` times: a, a, b, b with `interleave`, otherwise a, b, a, b."""
        times = as_count(repeat_times, "repeat_times", 0)
        return self._map_rows(len(self) * times, lambda column: repeat_rows(column, times, interleave))

    def sample_level_repeat(self, repeat_times: Sequence | np.ndarray | torch.Tensor) -> "DataProto":
        """Return row i `repeat_times[i]` times in succession; 0 drops it."""
        times = np.asarray(repeat_times.cpu() if isinstance(repeat_times, torch.Tensor) else repeat_times)
        if times.shape != (len(self),) or (times.dtype.kind not in "iu" and len(self)) or (times < 0).any():
            raise BatchError(
                f"sample_level_repeat needs one integer >= 0 for each of the {len(self)} rows, got {repeat_times!r}."
            )
        return self.select_idxs(np.repeat(np.arange(len(self)), times.astype(np.int64)))

    def _map_rows(self, num_rows: int, change: Callable[[Any], Any]) -> "DataProto":
        """Return the batch with `change` applied to every column; the result has `num_rows` rows."""
        self.check_consistency()
        return self._map_consistent(num_rows, change)

    def _map_consistent(self, num_rows: int, change: Callable[[Any], Any]) -> "DataProto":
        batch = self.batch
        if batch is not None:
            columns = {name: change(column) for name, column in batch.items()}
            batch = TensorDict(columns, [num_rows], device=batch.device)
        arrays = {name: change(array) for name, array in self.non_tensor_batch.items()}
        return self._unchecked(batch, arrays, copy_structure(self.meta_info), self.auto_padding)

    # Chunks and concatenation

    def chunk(self, chunks: int) -> "list[DataProto]":
        """Return `chunks` parts of equal length (views).

        If padding is enabled, the lengths may differ by one row, longer parts first (5 rows in 4 chunks: 2, 1, 1, 1).
        Otherwise raises BatchError if the number of rows is not divisible by `chunks`.
        """
        chunks = as_count(chunks, "chunks", 1)
        size, longer = divmod(len(self), chunks)
        if longer and not self.is_padding_enabled():
            raise BatchError(
                f"{len(self)} rows do not make {chunks} equal parts; use pad_dataproto_to_divisor, enable padding "
                "(auto_padding=True, or DataProtoConfig.auto_padding), or split by size."
            )
        return self._parts([size + (part < longer) for part in range(chunks)])

    def split(self, split_size: int) -> "list[DataProto]":
        """Return parts of `split_size` rows (views), the last one shorter; one empty part if there are no rows."""
        size = as_count(split_size, "split_size", 1)
        return self._parts([min(size, len(self) - start) for start in range(0, max(len(self), 1), size)])

    def _parts(self, sizes: list[int]) -> "list[DataProto]":
        self.check_consistency()
        batches = [None] * len(sizes) if self.batch is None else self.batch.split(sizes)
        arrays = {name: np.split(array, np.cumsum(sizes)[:-1]) for name, array in self.non_tensor_batch.items()}
        return [
            self._unchecked(
                batch, {n: a[part] for n, a in arrays.items()}, copy_structure(self.meta_info), self.auto_padding
            )
            for part, batch in enumerate(batches)
        ]

    @staticmethod
    def concat(data: "Iterable[DataProto]") -> "DataProto":
        """Return the rows of all parts, in order.

        Columns of different lengths are padded by the rules of the glossary. The prompt and the response part of
        input_ids, attention_mask and position_ids are padded separately. meta_info is merged; "metrics" becomes one
        list per name. Raises FieldError if the parts have different columns, BatchError if shapes, dtypes or
        meta_info conflict, or if a part is not a batch.
        """
        is_one = isinstance(data, DataProto) or not isinstance(data, Iterable)  # a batch iterates over its rows
        parts: list[Any] = [] if is_one else list(data)
        wrong = [data] if is_one else [part for part in parts if not isinstance(part, DataProto)]
        if wrong:
            raise BatchError(
                f"concat takes batches in a list or another iterable, got {type(wrong[0]).__name__}; write "
                "DataProto.concat([first, second])."
            )
        return concat.concat_batches(parts)

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: dict | None = None
    ) -> "Iterator[DataProto]":
        """Iterate over the mini-batches of every epoch.

        With a seed, each epoch shuffles the rows anew, reproducibly; without one, their order is kept.
        `dataloader_kwargs` may hold "shuffle" (False keeps the order even with a seed) and "drop_last" (False yields
        a short last mini-batch, True drops its rows; without this key the size must divide the batch).
        """
        size = as_count(mini_batch_size, "mini_batch_size", 1)
        epochs = as_count(epochs, "epochs", 0)
        seed = None if seed is None else as_count(seed, "seed", 0)
        options = dict(dataloader_kwargs or {})
        unknown = [name for name in options if name not in _SHUFFLING]
        if unknown:
            raise BatchError(
                f"make_iterator: dataloader_kwargs has unknown keys {unknown}; valid are {list(_SHUFFLING)}."
            )
        shuffle = bool(options.get("shuffle", seed is not None))
        if shuffle and seed is None:
            raise BatchError(
                "make_iterator: shuffle=True needs a seed, so that the order is reproducible; pass seed=..."
            )
        if len(self) % size and "drop_last" not in options:
            raise BatchError(
                f"make_iterator: mini_batch_size={size} does not divide the {len(self)} rows; use a divisor, or "
                "dataloader_kwargs={'drop_last': False} for a short last mini-batch, or True to drop its rows."
            )
        stop = len(self) - len(self) % size if options.get("drop_last") else len(self)
        return self._mini_batches(size, stop, epochs, seed if shuffle else None)

    def _mini_batches(self, size: int, stop: int, epochs: int, seed: int | None) -> "Iterator[DataProto]":
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = None if generator is None else torch.randperm(len(self), generator=generator)
            for start in range(0, stop, size):
                end = min(start + size, stop)
                yield self.slice(start, end) if order is None else self.select_idxs(order[start:end])

    # Columns

    def select(
        self,
        batch_keys: Names = None,
        non_tensor_batch_keys: Names = None,
        meta_info_keys: Names = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """Return the named columns and meta_info keys; None keeps all of that kind. `deepcopy` copies contents too."""
        self.check_consistency()
        columns, arrays, meta_info = pick(self, batch_keys, non_tensor_batch_keys, meta_info_keys, True)
        batch = self.batch
        if deepcopy:
            columns = {name: column.clone() for name, column in columns.items()}
            arrays, meta_info = copy.deepcopy(arrays), copy.deepcopy(meta_info)
        if batch is not None:
            batch = TensorDict(columns, batch.batch_size, device=batch.device)
        return self._unchecked(batch, arrays, copy_structure(meta_info), self.auto_padding)

    def pop(
        self, batch_keys: Names = None, non_tensor_batch_keys: Names = None, meta_info_keys: Names = None
    ) -> "DataProto":
        """Remove the named columns and meta_info keys FROM THIS BATCH and return them as another batch.

        Each argument is one name, several or None (nothing). Raises FieldError, and removes nothing, if one is missing.
        """
        self.check_consistency()
        columns, arrays, meta_info = pick(self, batch_keys, non_tensor_batch_keys, meta_info_keys, False)
        batch = TensorDict(columns, self.batch.batch_size, device=self.batch.device) if columns else None
        popped = type(self)(batch, arrays, meta_info, self.auto_padding)  # pyright: ignore[reportArgumentType]
        for name in columns:
            del self.batch[name]
        for name in arrays:
            del self.non_tensor_batch[name]
        for key in meta_info:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: Names = None, new_keys: Names = None) -> "DataProto":
        """Return the batch with renamed columns of either kind, all renamed at once (so that two can be exchanged).

        Raises FieldError for a missing column and for a new name that another column has.
        """
        return rename_columns(self, old_keys, new_keys)

    @overload
    def union(self, other: "DataProto") -> "DataProto": ...
    @overload
    def union(self, other: Futures) -> Futures: ...
    def union(self, other: "DataProto | Future") -> "DataProto | Future":
        """Return the columns of both batches side by side; the union with a future is a future and reads nothing.

        Raises FieldError if both have a column with different contents (NaN equals NaN), BatchError if both have a key
        of meta_info with different values or the numbers of rows differ. "metrics" is joined name by name.
        """
        if not isinstance(other, DataProto):
            if not isinstance(other, Future):
                raise BatchError(f"union needs a DataProto or a DataProtoFuture, got {type(other).__name__}.")
            return other.of(self).union(other)
        mine = count_rows(self.batch, self.non_tensor_batch, self.meta_info)
        theirs = count_rows(other.batch, other.non_tensor_batch, other.meta_info)
        if mine is not None and theirs is not None and mine != theirs:
            raise BatchError(f"union: this batch has {mine} rows, the other has {theirs}.")
        batch = self.batch if self.batch is not None else other.batch
        if batch is not None:
            columns = union_columns(tensors_of(self.batch), tensors_of(other.batch))
            batch = TensorDict(columns, batch.batch_size, device=batch.device)  # pyright: ignore[reportArgumentType]
        arrays: Any = union_columns(self.non_tensor_batch, other.non_tensor_batch)
        meta_info = union_meta_info(self.meta_info, other.meta_info)
        return type(self)(batch, arrays, meta_info, self.auto_padding or other.auto_padding)

    def to(self, device: str | torch.device | int) -> "DataProto":
        """Return the batch with its tensors on `device`; numpy columns stay on the CPU."""
        batch = None if self.batch is None else self.batch.to(device)
        return type(self)(batch, self.non_tensor_batch, self.meta_info, self.auto_padding)  # pyright: ignore

    # Padding

    def is_padding_enabled(self) -> bool:
        """Return whether dispatch may pad this batch: `auto_padding` of the batch or of DataProtoConfig is set."""
        return self.auto_padding or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "first") -> None:
        """Append `padding_size` copies of the "first" or "last" row TO THIS BATCH, marked by `duplicate_value`."""
        padding_size = as_count(padding_size, "padding_size", 0)
        if padding_candidate not in ("first", "last"):
            raise BatchError(f"padding_candidate={padding_candidate!r} is invalid; valid are 'first' and 'last'.")
        if padding_size and not len(self):
            raise BatchError("a batch without rows cannot be padded: there is no row to copy.")
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = append_copies(self, np.full(padding_size, row))
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    # Storage

    def save_to_disk(self, filepath: str | os.PathLike) -> None:
        """Save to one file, replaced atomically. Raises BatchError for an object that is not plain data."""
        disk_format.save_batch(self, filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike) -> "DataProto":
        """Load a batch to the CPU without executing code from the file. Raises BatchError if it is not readable."""
        return disk_format.load_batch(DataProto, filepath)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return PackedBatch.read, (PackedBatch.pack(self),)

    def __copy__(self) -> "DataProto":
        return self.select()

    def __deepcopy__(self, memo: dict) -> "DataProto":
        return self.select(deepcopy=True)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Return a batch whose length is a multiple of `size_divisor`, and the number of appended rows.

    The appended rows are copies of the first ones, repeated as often as needed. Columns with a `duplicate_value` in
    the glossary hold that value there (`row_ids` is -1), so that no metric or update counts a copy. `data` is not
    changed.
    """
    size_divisor = as_count(size_divisor, "size_divisor", 1)
    pad_size = -len(data) % size_divisor
    return append_copies(data, np.arange(pad_size) % max(len(data), 1)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the batch without its last `pad_size` rows (views)."""
    pad_size = as_count(pad_size, "pad_size", 0)
    if pad_size > len(data):
        raise BatchError(f"pad_size={pad_size} is invalid: the batch has only {len(data)} rows.")
    return data.slice(0, len(data) - pad_size)
