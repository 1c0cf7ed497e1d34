"""`@register`: declares that a worker method may be called on the whole group, and how. It only attaches the
declaration: the method itself stays as written, so a debugger steps straight into it.
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
    """Which ranks run a call, and in which order."""

    ALL = "all"
    """All ranks, at the same time where the backend has a process for each."""
    RANK_ZERO = "rank_zero"
    """Rank 0 alone; the call returns its result, not a list."""
    SEQUENTIAL = "sequential"
    """All ranks, each after the one before has finished."""


@dataclass(frozen=True)
class Registration:
    """What `@register` was told about a method."""

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
    """Make a worker method a call on the whole group.

    - `dispatch_mode`: how arguments are split and results collected: `Dispatch.X`, the name of a registered mode,
      or what `make_nd_compute_dataproto_dispatch_fn` returns.
    - `blocking=False`: the call returns a `DataProtoFuture`, as `.remote(...)` always does.
    - `materialize_futures=False`: a future given as argument is not read by the controller; the worker gets a
      `DataProtoFuture` of its part and reads it itself.
    - `reads`, `writes`: the columns the method needs and makes, or a function of the configuration that returns
      them, resolved when the method is bound. None: everything is shipped, the result is not checked.
    - `rows`: rows out per row in: "same", a number, a function of the configuration; "one": the result does not
      have the rows of the batch (metrics only, or one row for each part).
    - `keep_groups`: a column, "group_ids" for one, whose equal values stay on one rank; padding is by whole groups.
    - `parts`: "equal", or "measured": a rank that was slower in the last calls gets fewer rows; or a function of the
      configuration. For methods whose rows do not depend on each other.

    Raises DispatchError if the declaration contradicts itself.
    """
    if inspect.isfunction(dispatch_mode):
        raise DispatchError(f"@register on {dispatch_mode.__qualname__}: write @register() with parentheses.")
    mode = find_dispatch_mode(dispatch_mode)
    if mode is Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO
    if execute_mode is Execute.RANK_ZERO and mode.num_parts is not None:
        raise DispatchError(
            f"{mode.name} splits a batch over all ranks, Execute.RANK_ZERO would run one part of it only; "
            f"use Dispatch.RANK_ZERO or Dispatch.ONE_TO_ALL, which hand rank 0 the whole batch."
        )
    if keep_groups is not None and mode.num_parts is None:
        raise DispatchError(
            f"keep_groups={keep_groups!r}: {mode.name} splits no batch, so there are no groups to keep."
        )
    if parts != "equal" and mode.part_of_rank is None:
        raise DispatchError(f"parts={parts!r}: {mode.name} makes its parts itself; use a mode that splits batches.")
    if not callable(parts):
        check_parts("parts", parts)
    if not isinstance(execute_mode, Execute):
        raise DispatchError(f"execute_mode={execute_mode!r}; use Execute.ALL, Execute.RANK_ZERO or Execute.SEQUENTIAL.")
    for name, columns in (("reads", reads), ("writes", writes)):
        if not callable(columns):
            check_columns(name, columns)
    if not callable(rows):
        check_rows("rows", rows)

    def attach(method: _Method) -> _Method:
        where = getattr(method, "__qualname__", repr(method))
        if not inspect.isfunction(method):
            raise DispatchError(f"@register on {where}: needs a plain method, got {type(method).__name__}.")
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
    """`parts` if it is one of the two kinds; DispatchError if not."""
    if parts not in PARTS:
        raise DispatchError(f"{what}={parts!r}: needs 'equal', 'measured', or a function of the configuration.")
    return parts


def registration_of(method: Any) -> Registration | None:
    """What a method was registered with; None if it was not."""
    return getattr(method, _ATTRIBUTE, None) if inspect.isfunction(method) else None


def registered_methods(cls: type) -> dict[str, Registration]:
    """All registered methods of a worker class, inherited ones too, by name."""
    found = {name: registration_of(inspect.getattr_static(cls, name)) for name in dir(cls)}
    return {name: registration for name, registration in found.items() if registration is not None}
