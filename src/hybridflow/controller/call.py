"""A call on a worker group: five functions, in the order in which a call runs them.

    group.method.remote(batch)
      check    the group is open; the batches have the columns that are read, and rows that can be split
      select   keep only the columns that are read, and pad each batch if there is not a row for each part
      split    make the arguments of each rank with the dispatch mode
      send     start one call on each rank; get a handle for each
      collect  make the future of the result from the handles

`BoundMethod.remote` runs them; `BoundMethod.__call__` also waits and reads the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch

from hybridflow.controller.backend import Backend, CallTerms, WorkerRef
from hybridflow.controller.class_with_init_args import ClassWithInitArgs
from hybridflow.controller.columns import MethodColumns
from hybridflow.controller.dispatch_functions import Group, collect_dp_compute_data_proto
from hybridflow.controller.part_sizes import (
    BALANCED_PART_SIZES,
    GroupShares,
    Parts,
    even_sizes,
    response_group_size,
    sizes_of_shares,
)
from hybridflow.controller.register import Execute, Registration
from hybridflow.errors import DispatchError, HybridFlowError
from hybridflow.protocol import (
    FIELDS,
    DataProto,
    DataProtoConfig,
    DataProtoFuture,
    Handle,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_BATCHES = (DataProto, DataProtoFuture)
_SHARED_TYPES = (DataProto, torch.Tensor, np.ndarray)


@dataclass(frozen=True)
class RowSplit:
    """The split of the rows of a call.

    `num_rows`: rows of the caller's batch. `pad_size`: padded copies. `part_sizes`: rows of each part, copies included.
    """

    num_rows: int
    pad_size: int
    part_sizes: tuple[int, ...]

    @property
    def own_sizes(self) -> list[int]:
        """The rows of each part that are not copies; copies are last."""
        ends = accumulate(self.part_sizes)
        return [max(0, size - max(0, end - self.num_rows)) for size, end in zip(self.part_sizes, ends, strict=True)]


class CalledGroup(Group, Protocol):
    """The part of a worker group that a call uses."""

    name: str
    backend: Backend
    cls_with_init: ClassWithInitArgs
    shares: GroupShares

    @property
    def workers(self) -> list[WorkerRef]:
        """The workers by rank."""
        ...

    def check_open(self, where: str) -> None:
        """Raise DispatchError if the group was shut down."""


class BoundMethod:
    """A registered worker method as one call on its whole group.

    Calling it returns the result; `.remote(...)` returns a `DataProtoFuture` of the result. `columns` is its resolved
    declaration (reads, writes, rows), `registration` holds the arguments of `@register`.
    """

    def __init__(self, group: CalledGroup, name: str, registration: Registration, columns: MethodColumns) -> None:
        self.group, self.mode = group, registration.dispatch_mode
        self.registration, self.columns = registration, columns
        self.__name__, self.__qualname__ = name, columns.where
        self.__doc__ = getattr(group.cls_with_init.cls, name).__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the call, or a future of it if the method was registered with `blocking=False`.

        Raises FieldError for a missing column, DispatchError for arguments that cannot be split, and the error of the
        worker.
        """
        future = self.remote(*args, **kwargs)
        if not self.registration.blocking:
            return future
        handles = [handle for read in future.handles() for handle in (read, *read.others)]
        handles = list({id(handle): handle for handle in handles}.values())
        try:
            self.group.backend.wait(handles)
            return future.get()
        finally:
            self.group.backend.release(handles)

    def remote(self, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Start the call and return a future; its `get()` returns the result of the blocking call."""
        rows, args, kwargs = check(self, args, kwargs)
        args, kwargs = select(self, rows, args, kwargs)
        per_rank, terms = split(self, rows, args, kwargs)
        handles = send(self.group, self.__name__, per_rank, terms, self.registration.execute_mode)
        return collect(self, rows, handles)

    def collected_ranks(self, rows: RowSplit | None) -> list[int]:
        """Return the ranks whose outputs are collected into the result, in order; none that has only copies."""
        if self.registration.execute_mode is Execute.RANK_ZERO:
            return [0]
        ranks = self.mode.collected_ranks or (lambda group: list(range(group.world_size)))
        if rows is None or not rows.pad_size or self.mode.part_of_rank is None:
            return ranks(self.group)
        part_of, own_sizes = self.mode.part_of_rank(self.group), rows.own_sizes
        return [rank for rank in ranks(self.group) if own_sizes[part_of[rank]]]

    def __repr__(self) -> str:
        return f"<{self.columns.where} of {self.group!r}>"


# ---------------------------------------------------------------------------------------------- to the ranks


def check(
    method: BoundMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[RowSplit | None, tuple[Any, ...], dict[str, Any]]:
    """Return the row split (None if no batch is split) and the arguments, in a form that a worker can read."""
    method.group.check_open(method.columns.where)
    if method.registration.materialize_futures:
        args, kwargs = _map(_open_without_table, args, kwargs)
    values = [*args, *kwargs.values()]
    rows = _split_of_rows(method, [value for value in values if isinstance(value, _BATCHES)])
    method.columns.check_reads(values)
    return rows, args, kwargs


def select(method: BoundMethod, rows: RowSplit | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments as they are sent: each batch padded, with only the columns that are read."""

    def selected(value: Any) -> Any:
        value = method.columns.select_reads(value)
        if rows is None or not rows.pad_size:
            return value
        if isinstance(value, DataProtoFuture):
            return value.pad_to_divisor(rows.num_rows + rows.pad_size)
        if isinstance(value, DataProto) and len(value):
            return pad_dataproto_to_divisor(value, rows.num_rows + rows.pad_size)[0]
        return value

    return _map(selected, args, kwargs)


def split(
    method: BoundMethod, rows: RowSplit | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Arguments], list[CallTerms]]:
    """Return the arguments of each rank, made by the dispatch mode, and the terms of each rank's call."""
    where, world_size = method.columns.where, method.group.world_size
    uneven = rows if rows is not None and len(set(rows.part_sizes)) > 1 else None
    if uneven is not None:
        args, kwargs = _map(partial(_uneven_parts, rows=uneven), args, kwargs)
    try:
        split_args, split_kwargs = method.mode.dispatch_fn(method.group, *args, **kwargs)
    except DispatchError as error:
        raise DispatchError(f"{where}: {error}") from error
    named: Mapping[Any, Any] = {**dict(enumerate(split_args)), **split_kwargs}
    for name, values in named.items():
        if not isinstance(values, Sequence) or len(values) != world_size:
            raise DispatchError(
                f"{where}: dispatch_fn of {method.mode} returned {values!r} for argument {name!r}; return a list with "
                f"one element for each of the {world_size} ranks."
            )
    per_rank, read = arguments_by_rank(split_args, split_kwargs, world_size), set(method.collected_ranks(rows))
    first = CallTerms(method.columns, rows and rows.part_sizes[0], True, method.registration.materialize_futures)
    unread = replace(first, is_read=False)
    terms = [first if rank in read else unread for rank in range(world_size)]
    if uneven is not None:
        terms = [replace(own, num_rows=_rows_of(values)) for own, values in zip(terms, per_rank, strict=True)]
    return per_rank, terms


def send(
    group: CalledGroup, name: str, per_rank: Sequence[Arguments], terms: Sequence[CallTerms], mode: Execute
) -> list[Handle]:
    """Call the named method on the ranks that `mode` selects; return a handle for each rank."""
    backend, count = group.backend, 1 if mode is Execute.RANK_ZERO else group.world_size
    workers, per_rank, terms = group.workers[:count], _put_shared(group, per_rank[:count]), terms[:count]
    if mode is not Execute.SEQUENTIAL:
        return list(backend.call_all(workers, name, per_rank, terms))
    handles: list[Handle] = []
    for rank, worker in enumerate(workers):
        handles += backend.call_all([worker], name, [per_rank[rank]], [terms[rank]])
        backend.wait(handles[-1:])
    return handles


# ---------------------------------------------------------------------------------------------- from the ranks


def collect(method: BoundMethod, rows: RowSplit | None, handles: list[Handle]) -> DataProtoFuture:
    """Return the future of the result: a table if the mode concatenates and the method declares its columns."""
    if rows is not None and not rows.pad_size and method.mode.part_of_rank is not None:
        method.group.shares.note_call(method.__name__, rows.part_sizes, method.mode.part_of_rank(method.group), handles)
    columns, ranks = method.columns, method.collected_ranks(rows)
    read, represented = [handles[rank] for rank in ranks], set(range(len(handles))).difference(ranks)
    others = [handles[rank] for rank in sorted(represented)]
    for handle in read if others else ():
        handle.others = others
    is_concat = method.mode.collect_fn is collect_dp_compute_data_proto
    if rows is not None and is_concat and columns.writes and columns.rows_per_row is not None:
        part_rows = [columns.rows_per_row * size for size in _collected_sizes(method, rows)]
        num_rows = columns.rows_per_row * rows.num_rows
        future = DataProtoFuture(
            DataProto.concat, read, num_rows=sum(part_rows), columns=columns.writes, part_rows=part_rows
        )
        return future.slice(0, num_rows) if sum(part_rows) > num_rows else future
    collected = partial(_collected, method, rows)
    shards = zip(rows.own_sizes, rows.part_sizes, strict=True) if rows is not None else ()
    has_whole_shards = is_concat and not any(0 < own < size for own, size in shards)  # none has both rows and copies
    return DataProtoFuture(collected, read, columns=columns.writes, has_whole_shards=has_whole_shards)


def _collected_sizes(method: BoundMethod, rows: RowSplit) -> list[int]:
    """Return the rows, copies included, of the parts whose outputs are collected."""
    if method.mode.part_of_rank is None:
        return list(rows.part_sizes)
    return [size for size, own in zip(rows.part_sizes, rows.own_sizes, strict=True) if own]


def _collected(method: BoundMethod, rows: RowSplit | None, outputs: list[Any]) -> Any:
    """Return the result collected from the outputs, without padded rows."""
    if method.registration.execute_mode is Execute.RANK_ZERO:
        return outputs[0]
    try:
        result = method.mode.collect_fn(method.group, outputs)
    except DispatchError as error:
        raise DispatchError(f"{method.columns.where}: {error}") from error
    except HybridFlowError as error:
        error.add_note(f"while collecting the results of {method.columns.where}")
        raise
    if rows is None or not (surplus := sum(_collected_sizes(method, rows)) - rows.num_rows):
        return result
    _require_no_counted_copies(method, surplus, outputs)
    if method.columns.rows_per_row is None:
        return result
    return _without_last_rows(result, method.columns.rows_per_row * surplus)


def _require_no_counted_copies(method: BoundMethod, num_copies: int, outputs: Sequence[Any]) -> None:
    """Raise DispatchError if ranks returned numbers that may count copies: their method does not read `row_ids`."""
    if any(FIELDS[column].duplicate_value is not None for column in method.columns.reads or () if column in FIELDS):
        return
    for output in outputs:
        has_metrics = isinstance(output, DataProto) and output.meta_info.get("metrics")
        if output is None or (isinstance(output, DataProto) and not has_metrics):
            continue
        what = "metrics" if has_metrics else type(output).__name__
        raise DispatchError(
            f"{method.columns.where} returned {what} for a batch with padded copies ({num_copies}), which would count "
            "as rows; turn auto_padding off (parts may then differ by one row), or declare reads with 'row_ids' and "
            "leave out the rows of -1."
        )


# ---------------------------------------------------------------------------------------------- helpers


def arguments_by_rank(
    args: Sequence[Sequence[Any]], kwargs: Mapping[str, Sequence[Any]], ranks: int
) -> list[Arguments]:
    """Return the arguments of each rank from lists with one element per rank."""
    return [
        (tuple(value[rank] for value in args), {key: value[rank] for key, value in kwargs.items()})
        for rank in range(ranks)
    ]


def _map(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return tuple(map(function, args)), {key: function(value) for key, value in kwargs.items()}


def _open_without_table(value: Any) -> Any:
    """Read a future without a table, also inside a list; the controller reads arguments only here."""
    if isinstance(value, (list, tuple)) and any(isinstance(element, DataProtoFuture) for element in value):
        return [_open_without_table(element) for element in value]
    return value.get() if isinstance(value, DataProtoFuture) and not value.is_table else value


def _split_of_rows(method: BoundMethod, batches: Sequence[DataProto | DataProtoFuture]) -> RowSplit | None:
    mode, registration, where = method.mode, method.registration, method.columns.where
    if mode.num_parts is None or all(isinstance(each, DataProtoFuture) and each.num_rows is None for each in batches):
        return None  # futures without a table are split by whole shards
    lengths = [len(batch) for batch in batches]
    if len(set(lengths)) > 1:
        raise DispatchError(
            f"{where} was called with batches of {' and '.join(map(str, lengths))} rows: the batches of one call are "
            f"split together and must have the same length; pass batches with equal numbers of rows."
        )
    if lengths[0] == 0:
        raise DispatchError(
            f"{where} was called with a batch of 0 rows, which cannot be split over the ranks; skip the call, or use "
            f"Dispatch.ONE_TO_ALL to send meta_info alone."
        )
    num_parts, unit = mode.num_parts(method.group), 1
    if registration.keep_groups is not None:
        unit = response_group_size(batches, registration.keep_groups, where)
    num_units = lengths[0] // unit
    of_groups = next((sizes for batch in batches if (sizes := batch.meta_info.get(BALANCED_PART_SIZES))), {})
    given = of_groups.get(method.group.name, ())
    if len(given) == num_parts and sum(given) == lengths[0]:
        return RowSplit(lengths[0], 0, tuple(given))
    shares = method.group.shares.of(method.__name__, num_parts)
    if shares is not None and num_units >= num_parts:
        return RowSplit(lengths[0], 0, tuple(size * unit for size in sizes_of_shares(shares.values, num_units)))
    of_futures = DataProtoConfig.auto_padding
    pads = any(of_futures if isinstance(b, DataProtoFuture) else b.is_padding_enabled() for b in batches)
    if num_units < num_parts or mode.part_of_rank is None or pads:
        pad_size = -lengths[0] % (num_parts * unit)
        return RowSplit(lengths[0], pad_size, ((lengths[0] + pad_size) // num_parts,) * num_parts)
    return RowSplit(lengths[0], 0, tuple(size * unit for size in even_sizes(num_units, num_parts)))


def _uneven_parts(value: Any, rows: RowSplit) -> Any:
    if not isinstance(value, _BATCHES):
        return value
    ends = list(accumulate(rows.part_sizes))
    return Parts(value.slice(end - size, end) for size, end in zip(rows.part_sizes, ends, strict=True))


def _rows_of(arguments: Arguments) -> int | None:
    """Return the number of rows of the first batch among the arguments of a rank; None if there is no batch."""
    args, kwargs = arguments
    return next((len(value) for value in (*args, *kwargs.values()) if isinstance(value, _BATCHES)), None)


def _put_shared(group: CalledGroup, per_rank: Sequence[Arguments]) -> list[Arguments]:
    """Put each batch, tensor or array that several ranks receive into the backend once; pass its handle instead."""
    values = [value for args, kwargs in per_rank for value in (*args, *kwargs.values())]
    seen = Counter(id(value) for value in values if isinstance(value, _SHARED_TYPES))
    handles = {id(v): group.backend.put(v) for v in {id(v): v for v in values if seen[id(v)] > 1}.values()}
    if not handles:
        return list(per_rank)

    def shared(value: Any) -> Any:
        return handles.get(id(value), value)

    return [_map(shared, args, kwargs) for args, kwargs in per_rank]


def _without_last_rows(result: Any, num_rows: int) -> Any:
    """Return a batch, or a list with one batch per rank, without its last rows; other values are unchanged."""
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
