"""The dispatch modes: how one call becomes a call on each rank, and the results of the ranks one result.

A mode is a pair of functions, with the signatures of the founding design:

    dispatch_fn(group, *args, **kwargs) -> (args, kwargs), each argument a list with one element per rank
    collect_fn(group, outputs)          -> result, from the outputs of the collected ranks, in order

`DISPATCH_MODES` is the table; `Dispatch.NAME` looks a mode up in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hybridflow.controller.dispatch_functions import (
    Dispatched,
    Group,
    PerRank,
    collect_all_to_all,
    collect_dp_compute_data_proto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_one_to_all,
    each_argument,
    require_batch,
    split,
    split_or_one_for_each,
)
from hybridflow.errors import DispatchError


@dataclass(frozen=True, eq=False)
class DispatchMode:
    """A named way to dispatch and collect.

    `num_parts`: into how many equal parts `dispatch_fn` splits batches; a batch is padded to a multiple of it
    before, and its padding removed from the result after. None: batches are not split.
    `collected_ranks`: whose outputs `collect_fn` gets, in order; None: those of all ranks.
    `part_of_rank`: which part each rank gets, of a `dispatch_fn` that also takes batches that are split already.
    """

    name: str
    dispatch_fn: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
    collect_fn: Callable[[Any, list[Any]], Any]
    num_parts: Callable[[Group], int] | None = None
    collected_ranks: Callable[[Group], list[int]] | None = None
    part_of_rank: Callable[[Group], list[int]] | None = None

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"


def make_nd_compute_dataproto_dispatch_fn(
    mesh_name: str = "default", split_axes: Sequence[str] = ("data",), name: str = ""
) -> DispatchMode:
    """A mode for a group whose ranks form a mesh: a batch is split along `split_axes`, every rank that differs
    only along other axes gets the same part, and one rank of each replica is collected and concatenated.

    `mesh_name` is one of the group's `meshes`. Pass the result to `@register(dispatch_mode=...)`.
    """
    return _mesh_mode(
        name or f"ND_COMPUTE_PROTO[{mesh_name}]", split, collect_dp_compute_data_proto, mesh_name, split_axes
    )


def _mesh_mode(
    name: str,
    split_value: Callable[[Any, int], list[Any]],
    collect_fn: Callable[[Any, list[Any]], Any],
    mesh_name: str = "default",
    split_axes: Sequence[str] = ("data",),
) -> DispatchMode:
    def part_of_rank(group: Group) -> list[int]:
        return group.mesh(mesh_name).part_of_rank(split_axes)

    def dispatch_fn(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
        if split_value is split:
            require_batch(args, kwargs)
        num_parts, part_of = group.mesh(mesh_name).num_parts(split_axes), part_of_rank(group)

        def to_ranks(value: Any) -> PerRank:
            parts = split_value(value, num_parts)
            return [parts[part] for part in part_of]

        return each_argument(to_ranks, args, kwargs)

    return DispatchMode(
        name,
        dispatch_fn,
        collect_fn,
        num_parts=lambda group: group.mesh(mesh_name).num_parts(split_axes),
        collected_ranks=lambda group: group.mesh(mesh_name).collected_ranks(split_axes),
        part_of_rank=part_of_rank,
    )


def _data_parallel(
    name: str, dispatch_fn: Callable[..., Dispatched], collect_fn: Callable[[Any, list[Any]], Any]
) -> DispatchMode:
    return DispatchMode(
        name,
        dispatch_fn,
        collect_fn,
        num_parts=lambda group: group.world_size,
        part_of_rank=lambda group: list(range(group.world_size)),
    )


DISPATCH_MODES: dict[str, DispatchMode] = {
    mode.name: mode
    for mode in (
        DispatchMode("RANK_ZERO", dispatch_one_to_all, collect_all_to_all),
        DispatchMode("ONE_TO_ALL", dispatch_one_to_all, collect_all_to_all),
        DispatchMode("ALL_TO_ALL", dispatch_all_to_all, collect_all_to_all),
        _data_parallel("DP_COMPUTE", dispatch_dp_compute, collect_all_to_all),
        _data_parallel("DP_COMPUTE_PROTO", dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
        _data_parallel(
            "DP_COMPUTE_PROTO_WITH_FUNC", dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto
        ),
        _data_parallel("DP_COMPUTE_METRIC", dispatch_dp_compute_data_proto, collect_all_to_all),
        _mesh_mode("MEGATRON_COMPUTE", split_or_one_for_each, collect_all_to_all),
        make_nd_compute_dataproto_dispatch_fn(name="MEGATRON_COMPUTE_PROTO"),
        make_nd_compute_dataproto_dispatch_fn(name="TP_FORWARD"),
    )
}


class _LookUp(type):
    """Attributes that are not defined are looked up in the table, so `Dispatch.MINE` works once it is registered."""

    def __getattr__(cls, name: str) -> DispatchMode:
        if name not in DISPATCH_MODES:
            raise AttributeError(f"no dispatch mode {name!r}; there are {', '.join(DISPATCH_MODES)}.")
        return DISPATCH_MODES[name]


class Dispatch(metaclass=_LookUp):
    """The dispatch modes by name.

    RANK_ZERO: rank 0 alone gets the arguments, its result is the result.
    ONE_TO_ALL: every rank gets the same arguments; a list of results.
    ALL_TO_ALL: a list argument holds one element per rank, others go to all; a list of results.
    DP_COMPUTE: as ALL_TO_ALL, and batches are split over the ranks.
    DP_COMPUTE_PROTO: batches are split over the ranks, the resulting batches concatenated.
    DP_COMPUTE_PROTO_WITH_FUNC: the same, with a function as first argument.
    DP_COMPUTE_METRIC: batches are split over the ranks; a list of results.
    MEGATRON_COMPUTE: as DP_COMPUTE over the data axis of the group's mesh, other axes replicated.
    MEGATRON_COMPUTE_PROTO, TP_FORWARD: as DP_COMPUTE_PROTO over the data axis of the group's mesh.
    """

    RANK_ZERO: ClassVar[DispatchMode]
    ONE_TO_ALL: ClassVar[DispatchMode]
    ALL_TO_ALL: ClassVar[DispatchMode]
    DP_COMPUTE: ClassVar[DispatchMode]
    DP_COMPUTE_PROTO: ClassVar[DispatchMode]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[DispatchMode]
    DP_COMPUTE_METRIC: ClassVar[DispatchMode]
    MEGATRON_COMPUTE: ClassVar[DispatchMode]
    MEGATRON_COMPUTE_PROTO: ClassVar[DispatchMode]
    TP_FORWARD: ClassVar[DispatchMode]


def register_dispatch_mode(
    name: str,
    dispatch_fn: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]],
    collect_fn: Callable[[Any, list[Any]], Any],
    num_parts: Callable[[Group], int] | None = None,
    collected_ranks: Callable[[Group], list[int]] | None = None,
) -> DispatchMode:
    """Add a mode of your own; use it as `Dispatch.NAME` or by its name.

    Give `num_parts` (see `DispatchMode`) to have batches padded before `dispatch_fn` and unpadded after
    `collect_fn`. Raises DispatchError if the name is taken.
    """
    if not name.isidentifier() or name.startswith("_"):
        raise DispatchError(f"dispatch mode {name!r}: the name must be an identifier, e.g. 'BY_LENGTH'.")
    if name in DISPATCH_MODES:
        raise DispatchError(f"dispatch mode {name!r} is already registered; choose another name.")
    for what, function in (("dispatch_fn", dispatch_fn), ("collect_fn", collect_fn)):
        if not callable(function):
            raise DispatchError(f"dispatch mode {name!r}: {what} must be a function, got {function!r}.")
    DISPATCH_MODES[name] = DispatchMode(name, dispatch_fn, collect_fn, num_parts, collected_ranks)
    return DISPATCH_MODES[name]


def find_dispatch_mode(mode: DispatchMode | str | Mapping[str, Callable[..., Any]]) -> DispatchMode:
    """The mode meant by a mode, its name, or a mapping with `dispatch_fn` and `collect_fn`."""
    if isinstance(mode, DispatchMode):
        return mode
    if isinstance(mode, str) and mode in DISPATCH_MODES:
        return DISPATCH_MODES[mode]
    if isinstance(mode, Mapping) and {"dispatch_fn", "collect_fn"} <= set(mode):
        return DispatchMode("CUSTOM", mode["dispatch_fn"], mode["collect_fn"])
    raise DispatchError(
        f"dispatch_mode={mode!r}: use one of {', '.join(f'Dispatch.{name}' for name in DISPATCH_MODES)}, "
        f"or a mode from register_dispatch_mode or make_nd_compute_dataproto_dispatch_fn."
    )
