"""Operations on the parameters of a model: replacing them in place, and this rank's shard of one."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter by `make(name, parameter)`, called once for tied parameters, which stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = make(f"{module_name}.{name}", parameter)
            setattr(module, name, made[parameter])


def local(parameter: Any) -> Any:
    """Return this rank's shard of a parameter; a parameter that is not sharded, or None, is returned unchanged."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def with_local(sharded: DTensor, shard: Tensor) -> DTensor:
    """Return a DTensor that is sharded as `sharded` and has this shard, which may be on the host, without a copy.

    It can be read, as by `torch.distributed.checkpoint`; its shard is not moved to the device of the mesh.
    """
    return DTensor(shard, sharded._spec, requires_grad=False)


def part_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of `whole`, sharded as `parameter` is, without communication."""
    if not isinstance(parameter, DTensor):
        return whole
    whole = whole.to(parameter.device_mesh.device_type)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
