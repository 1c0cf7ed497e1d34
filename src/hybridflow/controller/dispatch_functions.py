"""Dispatch functions (arguments of a call to arguments of each rank) and collect functions (outputs to one result).

The dispatch modes are built from them. Each takes the group first, has the signature of the original HybridFlow design,
and is stateless.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDictBase

from hybridflow.controller.mesh import Mesh
from hybridflow.controller.part_sizes import Parts
from hybridflow.errors import DispatchError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.protocol.future import concat_results

PerRank = list[Any]
Dispatched = tuple[tuple[PerRank, ...], dict[str, PerRank]]


class Group(Protocol):
    """The part of a worker group that a dispatch mode may use."""

    @property
    def world_size(self) -> int:
        """The number of workers in the group."""
        ...

    def mesh(self, name: str = "default") -> Mesh:
        """Return the named mesh of the group."""
        ...


def dispatch_one_to_all(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    """Give every rank the same arguments."""
    return each_argument(lambda value: [value] * group.world_size, args, kwargs)


def dispatch_all_to_all(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    """Give each rank one element of a list or tuple; send other values to all ranks."""
    return each_argument(lambda value: _one_for_each(value, group.world_size, "ranks"), args, kwargs)


def split(value: Any, num_parts: int) -> list[Any]:
    """Return the equal parts of a batch, or any other value repeated `num_parts` times."""
    if isinstance(value, DataProtoFuture) or (isinstance(value, DataProto) and len(value) > 0):
        return list(value.chunk(num_parts))
    if isinstance(value, Parts):
        return list(value)
    _require_not_rows(value)
    return [value] * num_parts


def _require_not_rows(value: Any) -> None:
    """Raise DispatchError for a TensorDict with a batch dimension: every rank would count all of its rows."""
    if isinstance(value, TensorDictBase) and value.batch_size:
        raise DispatchError(
            f"a TensorDict of {value.batch_size[0]} rows cannot be split over the ranks; use "
            "DataProto.from_tensordict(...) to split it, or Dispatch.ONE_TO_ALL to send it whole to every rank."
        )


def require_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise DispatchError if no argument is a batch: every rank would repeat the same work."""
    values = [*args, *kwargs.values()]
    if values and not any(isinstance(value, (DataProto, DataProtoFuture, Parts)) for value in values):
        types = ", ".join(type(value).__name__ for value in values)
        raise DispatchError(
            f"this mode splits a DataProto over the ranks, but the arguments are {types}; use "
            f"DataProto.from_dict to make a batch, or Dispatch.ONE_TO_ALL to send all ranks the same arguments."
        )


def require_function_and_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise DispatchError unless the first argument is a function, and another one a batch."""
    func = args[0] if args else next(iter(kwargs.values()), None)
    if not callable(func):
        raise DispatchError(
            f"the first argument of DP_COMPUTE_PROTO_WITH_FUNC must be a function, got {type(func).__name__}."
        )
    require_batch(args, kwargs)


def require_nothing(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Accept all arguments."""


def split_or_one_for_each(value: Any, num_parts: int) -> list[Any]:
    """Return the equal parts of a batch, the elements of a list or tuple (one per part), or a repeated other value."""
    if isinstance(value, (DataProto, DataProtoFuture, Parts)):
        return split(value, num_parts)
    _require_not_rows(value)
    return _one_for_each(value, num_parts, "data-parallel ranks")


def _one_for_each(value: Any, count: int, receivers: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise DispatchError(
            f"a {type(value).__name__} of {len(value)} elements cannot be split over {count} {receivers}: it must hold "
            f"one element for each; use Dispatch.ONE_TO_ALL to send the whole {type(value).__name__} to all of them."
        )
    return list(value)


def each_argument(split_value: Callable[[Any], PerRank], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dispatched:
    """Apply `split_value` to every argument."""
    return tuple(split_value(value) for value in args), {key: split_value(value) for key, value in kwargs.items()}


def collect_all_to_all(group: Group, outputs: list[Any]) -> list[Any]:
    """Return the outputs as a list, one for each collected rank."""
    return outputs


def collect_dp_compute_data_proto(group: Group, outputs: list[Any]) -> DataProto | None:
    """Return the concatenated rows of all outputs, in order; None if the method returned None on every rank."""
    return concat_results(outputs)
