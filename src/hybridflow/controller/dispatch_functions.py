"""The functions that modes are made of: arguments of one call to arguments of each rank, and results to one result.

Each takes the group first, has the signature of the founding design, and keeps nothing between calls.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hybridflow.controller.mesh import Mesh
from hybridflow.controller.part_sizes import Parts
from hybridflow.errors import DispatchError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.protocol.future import concat_results

PerRank = list[Any]
Dispatched = tuple[tuple[PerRank, ...], dict[str, PerRank]]


class Group(Protocol):
    """What a mode may know of the group it works for."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str = "default") -> Mesh: ...


def dispatch_one_to_all(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    """Every rank gets the same arguments."""
    return each_argument(lambda value: [value] * group.world_size, args, kwargs)


def dispatch_all_to_all(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    """A list or tuple holds one element for each rank; anything else goes to all ranks."""
    return each_argument(lambda value: _one_for_each(value, group.world_size, "ranks"), args, kwargs)


def dispatch_dp_compute(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    """A batch is split over the ranks, a list or tuple holds one element for each; anything else goes to all."""
    return each_argument(lambda value: split_or_one_for_each(value, group.world_size), args, kwargs)


def dispatch_dp_compute_data_proto(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    """Batches are split over the ranks, anything else goes to all."""
    require_batch(args, kwargs)
    return each_argument(lambda value: split(value, group.world_size), args, kwargs)


def dispatch_dp_compute_data_proto_with_func(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    """As `dispatch_dp_compute_data_proto`; the first argument is a function that every rank gets."""
    func = args[0] if args else next(iter(kwargs.values()), None)
    if not callable(func):
        raise DispatchError(
            f"DP_COMPUTE_PROTO_WITH_FUNC needs a function as first argument, got {type(func).__name__}."
        )
    return dispatch_dp_compute_data_proto(group, *args, **kwargs)


def split(value: Any, num_parts: int) -> list[Any]:
    """A batch in equal parts; anything else `num_parts` times."""
    if isinstance(value, DataProtoFuture) or (isinstance(value, DataProto) and len(value) > 0):
        return list(value.chunk(num_parts))
    if isinstance(value, Parts):
        return list(value)
    return [value] * num_parts


def require_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises DispatchError for arguments without a batch: each rank would do the same work again."""
    values = [*args, *kwargs.values()]
    if values and not any(isinstance(value, (DataProto, DataProtoFuture, Parts)) for value in values):
        raise DispatchError(
            f"this mode splits a DataProto over the ranks, but the arguments are {', '.join(_type_names(values))}; use "
            f"DataProto.from_dict to make a batch, or Dispatch.ONE_TO_ALL to give every rank the same arguments."
        )


def _type_names(values: Sequence[Any]) -> list[str]:
    return [type(value).__name__ for value in values]


def split_or_one_for_each(value: Any, num_parts: int) -> list[Any]:
    """A batch in equal parts; of a list or tuple one element for each part; anything else `num_parts` times."""
    if isinstance(value, (DataProto, DataProtoFuture)):
        return split(value, num_parts)
    return _one_for_each(value, num_parts, "data-parallel ranks")


def _one_for_each(value: Any, count: int, of_what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise DispatchError(
            f"a {type(value).__name__} of {len(value)} for {count} {of_what}: a list or tuple holds one for each; "
            f"use Dispatch.ONE_TO_ALL to give all of them the same."
        )
    return list(value)


def each_argument(split_value: Callable[[Any], PerRank], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dispatched:
    """`split_value` of every argument."""
    return tuple(split_value(value) for value in args), {key: split_value(value) for key, value in kwargs.items()}


def collect_all_to_all(group: Group, outputs: list[Any]) -> list[Any]:
    """The outputs as they are, one for each collected rank."""
    return outputs


def collect_dp_compute_data_proto(group: Group, outputs: list[Any]) -> DataProto | None:
    """The rows of all outputs, in order; None if the method returned None everywhere."""
    return concat_results(outputs)
