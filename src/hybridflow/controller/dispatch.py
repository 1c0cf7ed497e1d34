"""The dispatch modes: how one call becomes a call on each rank, and how the outputs of the ranks become one result.

A mode is a pair of functions, with the signatures of the original HybridFlow design:

    dispatch_fn(group, *args, **kwargs) -> (args, kwargs), each argument a list with one element per rank
    collect_fn(group, outputs)          -> result, from the outputs of the collected ranks, in order

The built-in modes are attributes of `Dispatch`; `DISPATCH_MODES` also holds those that `register_dispatch_mode` adds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.controller.dispatch_functions import (
    Dispatched,
    Group,
    PerRank,
    collect_all_to_all,
    collect_dp_compute_data_proto,
    dispatch_all_to_all,
    dispatch_one_to_all,
    each_argument,
    require_batch,
    require_function_and_batch,
    require_nothing,
    split,
    split_or_one_for_each,
)
from hybridflow.errors import DispatchError


@dataclass(frozen=True, eq=False)
class DispatchMode:
    """A named pair of a dispatch and a collect function.

    `num_parts`: number of parts into which `dispatch_fn` splits batches. Without `part_of_rank`, a batch is padded to a
    multiple of it before the call, and the padding is removed from the result. None: batches are not split.
    `collected_ranks`: the ranks whose outputs `collect_fn` gets, in order; None: all ranks.
    `part_of_rank`: the part that each rank gets, for a `dispatch_fn` that also accepts batches split in advance, into
    parts that may differ in length.
    `description`: one sentence on arguments and result, shown in the documentation.
    """

    name: str
    dispatch_fn: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
    collect_fn: Callable[[Any, list[Any]], Any]
    num_parts: Callable[[Group], int] | None = None
    collected_ranks: Callable[[Group], list[int]] | None = None
    part_of_rank: Callable[[Group], list[int]] | None = None
    description: str = ""

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"


def make_nd_compute_dataproto_dispatch_fn(
    mesh_name: str = "default", split_axes: Sequence[str] = ("data",), name: str = ""
) -> DispatchMode:
    """Return a mode for a group whose ranks form a device mesh.

    A batch is split along `split_axes`. Ranks that differ only along other axes get the same part. The output of one
    rank of each replica is collected, and these are concatenated. `mesh_name` is one of the group's `meshes`. Pass the
    result to `@register(dispatch_mode=...)`.
    """
    return _split_mode(
        name or f"ND_COMPUTE_PROTO[{mesh_name}]",
        "",
        split,
        require_batch,
        collect_dp_compute_data_proto,
        mesh_name,
        split_axes,
    )


def _split_mode(
    name: str,
    description: str,
    split_value: Callable[[Any, int], list[Any]],
    require: Callable[[Sequence[Any], Mapping[str, Any]], None],
    collect_fn: Callable[[Any, list[Any]], Any],
    mesh_name: str = "",
    split_axes: Sequence[str] = ("data",),
) -> DispatchMode:
    """Return a mode with a part for each rank, or with `mesh_name` one for each place along `split_axes`."""

    def num_parts(group: Group) -> int:
        return group.mesh(mesh_name).num_parts(split_axes) if mesh_name else group.world_size

    def part_of_rank(group: Group) -> list[int]:
        return group.mesh(mesh_name).part_of_rank(split_axes) if mesh_name else list(range(group.world_size))

    def dispatch_fn(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
        require(args, kwargs)
        count, part_of = num_parts(group), part_of_rank(group)

        def to_ranks(value: Any) -> PerRank:
            parts = split_value(value, count)
            return [parts[part] for part in part_of]

        return each_argument(to_ranks, args, kwargs)

    collected_ranks = (lambda group: group.mesh(mesh_name).collected_ranks(split_axes)) if mesh_name else None
    return DispatchMode(name, dispatch_fn, collect_fn, num_parts, collected_ranks, part_of_rank, description)


class _LookUp(type):
    """A metaclass that looks up undefined attributes in `DISPATCH_MODES`: `Dispatch.MINE` finds a registered mode."""

    def __getattr__(cls, name: str) -> DispatchMode:
        if name not in DISPATCH_MODES:
            raise AttributeError(f"{name!r} is not a dispatch mode; modes: {', '.join(DISPATCH_MODES)}.")
        return DISPATCH_MODES[name]


class Dispatch(metaclass=_LookUp):
    """The dispatch modes by name; each has a `description`."""

    RANK_ZERO = DispatchMode(
        "RANK_ZERO",
        dispatch_one_to_all,
        collect_all_to_all,
        description="Rank 0 alone gets the arguments; its result is the result.",
    )
    ONE_TO_ALL = DispatchMode(
        "ONE_TO_ALL",
        dispatch_one_to_all,
        collect_all_to_all,
        description="Every rank gets the same arguments; the result is a list.",
    )
    ALL_TO_ALL = DispatchMode(
        "ALL_TO_ALL",
        dispatch_all_to_all,
        collect_all_to_all,
        description="A list or tuple holds one element for each rank, other arguments go to all; the result is a list.",
    )
    DP_COMPUTE = _split_mode(
        "DP_COMPUTE",
        "As `ALL_TO_ALL`, and batches are split over the ranks.",
        *(split_or_one_for_each, require_nothing, collect_all_to_all),
    )
    DP_COMPUTE_PROTO = _split_mode(
        "DP_COMPUTE_PROTO",
        "Batches are split over the ranks, other arguments go to all; the resulting batches are concatenated.",
        *(split, require_batch, collect_dp_compute_data_proto),
    )
    DP_COMPUTE_PROTO_WITH_FUNC = _split_mode(
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "As `DP_COMPUTE_PROTO`, with a function as first argument.",
        *(split, require_function_and_batch, collect_dp_compute_data_proto),
    )
    DP_COMPUTE_METRIC = _split_mode(
        "DP_COMPUTE_METRIC",
        "Batches are split over the ranks, other arguments go to all; the result is a list.",
        *(split, require_batch, collect_all_to_all),
    )
    MEGATRON_COMPUTE = _split_mode(
        "MEGATRON_COMPUTE",
        "As `DP_COMPUTE` over the data axis of the group's mesh; ranks along other axes get the same.",
        *(split_or_one_for_each, require_nothing, collect_all_to_all, "default"),
    )
    MEGATRON_COMPUTE_PROTO = _split_mode(
        "MEGATRON_COMPUTE_PROTO",
        "As `DP_COMPUTE_PROTO` over the data axis of the group's mesh.",
        *(split, require_batch, collect_dp_compute_data_proto, "default"),
    )
    TP_FORWARD = replace(MEGATRON_COMPUTE_PROTO, name="TP_FORWARD", description="The same as `MEGATRON_COMPUTE_PROTO`.")


DISPATCH_MODES: dict[str, DispatchMode] = {
    mode.name: mode for mode in vars(Dispatch).values() if isinstance(mode, DispatchMode)
}
"""The modes of `Dispatch` and the registered modes, by name."""


def register_dispatch_mode(
    name: str,
    dispatch_fn: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]],
    collect_fn: Callable[[Any, list[Any]], Any],
    num_parts: Callable[[Group], int] | None = None,
    collected_ranks: Callable[[Group], list[int]] | None = None,
) -> DispatchMode:
    """Register a custom mode; use it as `Dispatch.NAME` or by its name.

    With `num_parts` (see `DispatchMode`), batches are padded before `dispatch_fn` and unpadded after `collect_fn`.
    Raises DispatchError if the name is not an identifier or already registered.
    """
    if not name.isidentifier() or name.startswith("_"):
        raise DispatchError(f"dispatch mode {name!r} is invalid: the name must be an identifier, e.g. 'BY_LENGTH'.")
    if name in DISPATCH_MODES:
        raise DispatchError(f"dispatch mode {name!r} is already registered; choose another name.")
    for argument, function in (("dispatch_fn", dispatch_fn), ("collect_fn", collect_fn)):
        if not callable(function):
            raise DispatchError(f"dispatch mode {name!r}: {argument} must be a function, got {function!r}.")
    DISPATCH_MODES[name] = DispatchMode(name, dispatch_fn, collect_fn, num_parts, collected_ranks)
    return DISPATCH_MODES[name]


def find_dispatch_mode(mode: DispatchMode | str | Mapping[str, Callable[..., Any]]) -> DispatchMode:
    """Return the mode for a mode, its name, or a mapping with `dispatch_fn` and `collect_fn`."""
    if isinstance(mode, DispatchMode):
        return mode
    if isinstance(mode, str) and mode in DISPATCH_MODES:
        return DISPATCH_MODES[mode]
    if isinstance(mode, Mapping) and {"dispatch_fn", "collect_fn"} <= set(mode):
        return DispatchMode("CUSTOM", mode["dispatch_fn"], mode["collect_fn"])
    raise DispatchError(
        f"dispatch_mode={mode!r} is invalid: use one of {', '.join(f'Dispatch.{name}' for name in DISPATCH_MODES)}, "
        f"or a mode from register_dispatch_mode or make_nd_compute_dataproto_dispatch_fn."
    )
