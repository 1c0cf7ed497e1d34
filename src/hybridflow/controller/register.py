"""`@register`: declares that a worker method can be called on the whole group, and how.

It only attaches the declaration. The method is not wrapped, so a debugger steps straight into it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from hybridflow.controller.columns import ColumnsOf, RowsOf, check_columns, check_rows
from hybridflow.controller.dispatch import Dispatch, DispatchMode, find_dispatch_mode
from hybridflow.controller.part_sizes import PARTS, PartsOf
from hybridflow.errors import DispatchError

_ATTRIBUTE = "__hybridflow_registration__"
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Execute(Enum):
    """The ranks that run a call, and their order."""

    ALL = "all"
    """All ranks, at the same time if the backend has one process per rank."""
    RANK_ZERO = "rank_zero"
    """Rank 0 alone; the call returns its result, not a list."""
    SEQUENTIAL = "sequential"
    """All ranks, each after the previous rank has finished."""


@dataclass(frozen=True)
class Registration:
    """The arguments of `@register` for a method."""

    dispatch_mode: DispatchMode
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool
    reads: ColumnsOf
    writes: ColumnsOf
    rows: RowsOf
    keep_groups: str | None = None
    parts: PartsOf | Callable[[Any], PartsOf] = "equal"


def register(
    dispatch_mode: DispatchMode | str | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    reads: ColumnsOf = None,
    writes: ColumnsOf = None,
    rows: RowsOf = "same",
    keep_groups: str | None = None,
    parts: PartsOf | Callable[[Any], PartsOf] = "equal",
) -> Callable[[_Method], _Method]:
    """Make a worker method callable on the whole group.

    - `dispatch_mode`: how arguments are split and results collected: `Dispatch.X`, the name of a registered mode,
      or a mode from `make_nd_compute_dataproto_dispatch_fn`.
    - `blocking=False`: the call returns a `DataProtoFuture`, as `.remote(...)` always does.
    - `materialize_futures=False`: a future passed as an argument is not read before the method runs; the method gets a
      `DataProtoFuture` of its part and reads it itself.
    - `reads`, `writes`: the columns that the method needs and returns, or a function of the configuration that returns
      them, resolved when the method is bound. None: all columns are sent, the result is not checked.
    - `rows`: output rows per input row: "same", a number, or a function of the configuration; "one": the result does
      not have the rows of the batch (metrics only, or one row for each part).
    - `keep_groups`: a column, e.g. "group_ids"; rows with equal values stay on one rank, and padding adds whole groups.
    - `parts`: "equal", "measured" (a rank that was slower in recent calls gets fewer rows; for methods whose ranks do
      not wait for each other), "shares" (set as `group.shares.of_ranks`), or a function of the configuration.

    Raises DispatchError if the declaration is contradictory.
    """
    if inspect.isfunction(dispatch_mode):
        raise DispatchError(f"@register on {dispatch_mode.__qualname__}: write @register() with parentheses.")
    mode = find_dispatch_mode(dispatch_mode)
    if mode is Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO
    if execute_mode is Execute.RANK_ZERO and mode.num_parts is not None:
        raise DispatchError(
            f"execute_mode=Execute.RANK_ZERO is not supported with {mode.name}, which splits a batch over all ranks: "
            f"only one part would run; use Dispatch.RANK_ZERO or Dispatch.ONE_TO_ALL to send rank 0 the whole batch."
        )
    if keep_groups is not None and mode.num_parts is None:
        raise DispatchError(
            f"keep_groups={keep_groups!r} is not supported with {mode.name}, which does not split batches; use a mode "
            f"that splits batches, or remove keep_groups."
        )
    if parts != "equal" and mode.part_of_rank is None:
        raise DispatchError(
            f"parts={parts!r} is not supported with {mode.name}, which makes its parts itself; use a mode that splits "
            f"batches."
        )
    if not callable(parts):
        check_parts("parts", parts)
    if not isinstance(execute_mode, Execute):
        raise DispatchError(
            f"execute_mode={execute_mode!r} is invalid: use Execute.ALL, Execute.RANK_ZERO or Execute.SEQUENTIAL."
        )
    for name, columns in (("reads", reads), ("writes", writes)):
        if not callable(columns):
            check_columns(name, columns)
    if not callable(rows):
        check_rows("rows", rows)

    def attach(method: _Method) -> _Method:
        where = getattr(method, "__qualname__", repr(method))
        if not inspect.isfunction(method):
            raise DispatchError(f"@register on {where}: expected a plain method, got {type(method).__name__}.")
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            raise DispatchError(
                f"@register on {where}: workers are synchronous; write a plain def that returns its result."
            )
        registration = Registration(
            mode, execute_mode, blocking, materialize_futures, reads, writes, rows, keep_groups, parts
        )
        setattr(method, _ATTRIBUTE, registration)
        return cast(_Method, method)

    return attach


def check_parts(what: str, parts: Any) -> PartsOf:
    """Return `parts`. Raises DispatchError unless it is one of `PARTS`; `what` names it in the error."""
    if parts not in PARTS:
        raise DispatchError(
            f"{what}={parts!r} is invalid: expected 'equal', 'measured', 'shares', or a function of the configuration."
        )
    return parts


def registered_methods(cls: type) -> dict[str, Registration]:
    """Return the registrations of all registered methods of a worker class, including inherited ones, by name."""
    methods = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    registrations = {n: getattr(each, _ATTRIBUTE, None) for n, each in methods.items() if inspect.isfunction(each)}
    return {name: registration for name, registration in registrations.items() if registration is not None}
