"""`BoundMethod`: a registered worker method as one call on its whole group.

args -> futures opened -> columns read -> padded -> dispatch_fn -> rank 0 .. n-1
result <- unpadded <- collect_fn <- columns and rows checked <- outputs of the collected ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hybridflow.controller.backend import CallTerms
from hybridflow.controller.columns import MethodColumns
from hybridflow.controller.dispatch_functions import collect_dp_compute_data_proto
from hybridflow.controller.group_size import group_size
from hybridflow.controller.part_sizes import Parts
from hybridflow.controller.register import Execute, Registration
from hybridflow.errors import DispatchError, HybridFlowError
from hybridflow.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto

if TYPE_CHECKING:
    from hybridflow.controller.worker_group import WorkerGroup

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Rows:
    """The rows of one call: of the caller's batch, added to split it evenly, in each part."""

    num_rows: int
    pad_size: int
    part_sizes: tuple[int, ...]

    @property
    def are_equal(self) -> bool:
        """Whether all parts have as many rows."""
        return len(set(self.part_sizes)) == 1


class BoundMethod:
    """Call it for the result; `.remote(...)` for a `DataProtoFuture` of the result.

    `columns` is its resolved declaration (reads, writes, rows), `registration` what it was registered with.
    """

    def __init__(self, group: WorkerGroup, name: str, registration: Registration, columns: MethodColumns) -> None:
        self._group, self._mode = group, registration.dispatch_mode
        self._rank_zero_only = registration.execute_mode is Execute.RANK_ZERO
        self.registration, self.columns = registration, columns
        self.__name__, self.__qualname__ = name, columns.where
        self.__doc__ = getattr(group.cls_with_init.cls, name).__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the call, or a future of it if the method was registered with `blocking=False`.

        Raises FieldError for a missing column, DispatchError for arguments that cannot be split, and what the
        worker raised.
        """
        if not self.registration.blocking:
            return self.remote(*args, **kwargs)
        rows, handles = self._start(args, kwargs)
        backend = self._group.backend
        try:
            backend.wait(handles)
            if self._concatenates(rows):
                return self._concatenation(rows, handles).get()
            outputs = backend.get([handles[rank] for rank in self._collected_ranks()])
        finally:
            backend.release(handles)
        return self._finish(rows, outputs)

    def remote(self, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """A future whose `get()` is what the blocking call returns."""
        rows, handles = self._start(args, kwargs)
        if self._concatenates(rows):
            return self._concatenation(rows, handles)
        factor, writes, collected = self.columns.rows_per_row, self.columns.writes, self._collected_ranks()
        return DataProtoFuture(
            collect_fn=partial(self._finish_late, rows, self._others(handles)),
            futures=[handles[rank] for rank in collected],
            num_rows=factor * rows.num_rows if rows and factor and writes else None,
            columns=writes,
        )

    def _concatenates(self, rows: Rows | None) -> bool:
        """Whether the result is the rows of the collected ranks in order, with declared columns: parts of it can then
        be read from the ranks that hold them."""
        declares = bool(self.columns.writes) and self.columns.rows_per_row is not None
        return rows is not None and declares and self._mode.collect_fn is collect_dp_compute_data_proto

    def _concatenation(self, rows: Rows | None, handles: list[Any]) -> DataProtoFuture:
        assert rows is not None
        factor, collected, others = self.columns.rows_per_row or 1, self._collected_ranks(), self._others(handles)
        parts = [handles[rank] for rank in collected]
        if others:
            parts = [HandleOfReplica(part, others, self._group.backend) for part in parts]
        future = DataProtoFuture(
            DataProto.concat,
            parts,
            num_rows=factor * (rows.num_rows + rows.pad_size),
            columns=self.columns.writes,
            part_rows=[factor * size for size in rows.part_sizes],
        )
        return future.slice(0, factor * rows.num_rows) if rows.pad_size else future

    def _others(self, handles: list[Any]) -> list[Any]:
        spoken = set(self._collected_ranks())
        return [handle for rank, handle in enumerate(handles) if rank not in spoken]

    def __repr__(self) -> str:
        return f"<{self.columns.where} of {self._group!r}>"

    # ------------------------------------------------------------------------------------------ to the ranks

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Rows | None, list[Any]]:
        """Everything up to the ranks: the rows of the call (None if no batch is split), a handle for each rank."""
        try:
            return self._send(args, kwargs)
        except RecursionError as error:
            raise DispatchError(
                f"an argument of {self.columns.where} nests too deeply to be sent; if it is a future of hundreds of "
                f"operations, read it in between (future.get()), or do the operations in a worker."
            ) from error

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Rows | None, list[Any]]:
        self._group.check_open(self.columns.where)
        if self.registration.materialize_futures:
            args, kwargs = _map(_open_opaque, args, kwargs)
        batches = [value for value in (*args, *kwargs.values()) if isinstance(value, (DataProto, DataProtoFuture))]
        rows = self._count_rows(batches)
        self.columns.check_reads([*args, *kwargs.values()])
        args, kwargs = _map(partial(self._reduce, rows, is_alone=len(batches) == 1), args, kwargs)
        args, kwargs = _map(partial(_parts_of, rows=rows), args, kwargs)
        per_rank = self._dispatch(args, kwargs)
        terms = self._terms(rows, per_rank)
        handles = self._group.call_ranks(self.__name__, per_rank, self.registration.execute_mode, terms)
        if rows is not None and rows.pad_size == 0 and self.registration.parts == "measured":
            self._measure(rows, handles)
        return rows, handles

    def _terms(self, rows: Rows | None, per_rank: Sequence[Arguments]) -> list[CallTerms]:
        first = CallTerms(self.columns, rows and rows.part_sizes[0], True, self.registration.materialize_futures)
        unread, read = replace(first, is_read=False), set(self._collected_ranks())
        terms = [first if rank in read else unread for rank in range(self._group.world_size)]
        if rows is not None and not rows.are_equal:
            terms = [replace(own, num_rows=_rows_of(values)) for own, values in zip(terms, per_rank, strict=True)]
        return terms

    def _measure(self, rows: Rows, handles: Sequence[Any]) -> None:
        """Have the parts of the next calls follow how long this one takes on each rank."""
        assert self._mode.part_of_rank is not None, "register() asked for it"
        durations: list[list[Any]] = [[] for _ in rows.part_sizes]
        for part, handle in zip(self._mode.part_of_rank(self._group), handles, strict=True):
            durations[part].append(handle.duration)
        self._group.measured_parts(self.__name__, len(durations)).note(rows.part_sizes, durations)

    def _count_rows(self, batches: Sequence[DataProto | DataProtoFuture]) -> Rows | None:
        if self._mode.num_parts is None or not batches:
            return None
        lengths = [len(batch) for batch in batches]
        if len(set(lengths)) > 1:
            raise DispatchError(
                f"{self.columns.where} was called with batches of {' and '.join(map(str, lengths))} rows; the batches "
                f"of one call are split together and need the same length."
            )
        if lengths[0] == 0:
            raise DispatchError(
                f"{self.columns.where} was called with a batch of 0 rows: there is nothing to split over the ranks; "
                f"skip the call, or use Dispatch.ONE_TO_ALL to hand over meta_info alone."
            )
        num_parts, unit = self._mode.num_parts(self._group), 1
        if self.registration.keep_groups is not None:
            unit = group_size(batches, self.registration.keep_groups, self.columns.where)
        if self.registration.parts == "measured" and lengths[0] // unit >= num_parts:
            sizes = self._group.measured_parts(self.__name__, num_parts).sizes(lengths[0] // unit)
            return Rows(lengths[0], 0, tuple(size * unit for size in sizes))
        pad_size = -lengths[0] % (num_parts * unit)
        return Rows(lengths[0], pad_size, ((lengths[0] + pad_size) // num_parts,) * num_parts)

    def _reduce(self, rows: Rows | None, value: Any, is_alone: bool) -> Any:
        """What is sent of an argument: of a batch the columns that are read, with as many rows as can be split."""
        value = self.columns.select_reads(value)
        if isinstance(value, DataProtoFuture) and value.columns is None:
            num_rows = value.num_rows if rows is None else rows.num_rows + rows.pad_size
            return value.then(partial(_reduce_unread, self.columns, rows, is_alone), num_rows)
        if isinstance(value, DataProtoFuture):
            return value if rows is None else value.pad_to_divisor(rows.num_rows + rows.pad_size)
        return _padded(value, rows)

    def _dispatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
        """The arguments of each rank."""
        try:
            split_args, split_kwargs = self._mode.dispatch_fn(self._group, *args, **kwargs)
        except DispatchError as error:
            raise DispatchError(f"{self.columns.where}: {error}") from error
        world_size = self._group.world_size
        named: Mapping[Any, Any] = {**dict(enumerate(split_args)), **split_kwargs}
        for name, per_rank in named.items():
            if not isinstance(per_rank, Sequence) or len(per_rank) != world_size:
                raise DispatchError(
                    f"{self.columns.where}: {self._mode} made {per_rank!r} of argument {name!r}; its dispatch_fn must "
                    f"make a list with one element for each of the {world_size} ranks."
                )
        return [
            (tuple(value[rank] for value in split_args), {key: value[rank] for key, value in split_kwargs.items()})
            for rank in range(world_size)
        ]

    # ------------------------------------------------------------------------------------------ and back

    def _collected_ranks(self) -> list[int]:
        if self._rank_zero_only:
            return [0]
        if self._mode.collected_ranks is None:
            return list(range(self._group.world_size))
        return self._mode.collected_ranks(self._group)

    def _finish_late(self, rows: Rows | None, others: list[Any], outputs: list[Any]) -> Any:
        """As `_finish`, when a future is read: ranks whose results are not, must have succeeded too."""
        self._group.backend.wait(others)
        return self._finish(rows, outputs)

    def _finish(self, rows: Rows | None, outputs: list[Any]) -> Any:
        if self._rank_zero_only:
            return outputs[0]
        try:
            result = self._mode.collect_fn(self._group, outputs)
        except DispatchError as error:
            raise DispatchError(f"{self.columns.where}: {error}") from error
        except HybridFlowError as error:
            error.add_note(f"while collecting the results of {self.columns.where}")
            raise
        if rows is None or self.columns.rows_per_row is None or not rows.pad_size:
            return result
        return _without_last_rows(result, self.columns.rows_per_row * rows.pad_size)


@dataclass(frozen=True)
class HandleOfReplica:
    """The handle of a rank that speaks for others: when it is read here, they must have succeeded too."""

    handle: Any
    others: Sequence[Any]
    backend: Any

    def get(self) -> Any:
        self.backend.wait(self.others)
        return self.handle.get()

    def read(self, columns: tuple[str, ...] | None, rows: Any) -> Any:
        self.backend.wait(self.others)
        return self.handle.read(columns, rows)

    def view(self, columns: tuple[str, ...] | None, rows: Any) -> Any:
        self.backend.wait(self.others)
        return self.handle.view(columns, rows)


def _reduce_unread(columns: MethodColumns, rows: Rows | None, is_alone: bool, value: Any) -> Any:
    """As `BoundMethod._reduce`, of a future of undeclared columns, by the worker that reads it."""
    if is_alone:
        columns.check_reads([value])
    return _padded(columns.select_reads(value), rows)


def _rows_of(arguments: Arguments) -> int | None:
    """Of the batch among the arguments of a rank."""
    args, kwargs = arguments
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, (DataProto, DataProtoFuture))]
    return len(batches[0]) if batches else None


def _parts_of(value: Any, rows: Rows | None) -> Any:
    """A batch that is split into parts that are not equal, split; anything else as it is."""
    if rows is None or rows.are_equal or not isinstance(value, (DataProto, DataProtoFuture)):
        return value
    ends = list(accumulate(rows.part_sizes))
    return Parts(value.slice(end - size, end) for size, end in zip(rows.part_sizes, ends, strict=True))


def _padded(value: Any, rows: Rows | None) -> Any:
    if rows is not None and isinstance(value, DataProto) and rows.pad_size and len(value):
        value, _ = pad_dataproto_to_divisor(value, rows.num_rows + rows.pad_size)
    return value


def _open_opaque(value: Any) -> Any:
    """The one place where the controller reads a future that was given as argument: one that only it can read."""
    if isinstance(value, (list, tuple)) and any(isinstance(element, DataProtoFuture) for element in value):
        return [_open_opaque(element) for element in value]
    if isinstance(value, DataProtoFuture) and (not value.is_plain or value.columns is None):
        return value.get()
    return value


def _without_last_rows(result: Any, num_rows: int) -> Any:
    """A batch, or a list of the batches of each rank, without its last rows; anything else has no rows to lose."""
    if isinstance(result, DataProto):
        return unpad_dataproto(result, num_rows) if len(result) else result
    if not isinstance(result, list) or not all(isinstance(part, DataProto) and len(part) for part in result):
        return result
    kept = []
    for part in reversed(result):
        surplus = min(num_rows, len(part))
        kept.append(unpad_dataproto(part, surplus))
        num_rows -= surplus
    return kept[::-1]


def _map(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return tuple(map(function, args)), {key: function(value) for key, value in kwargs.items()}
