"""The parameters of a model: replaced where they are, and a rank's part of one that ranks share."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put `make(name, parameter)` in the place of each parameter; a tied one is made once and stays tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = make(f"{module_name}.{name}", parameter)
            setattr(module, name, made[parameter])


def local(parameter: Any) -> Any:
    """What this rank has of a parameter; a parameter that is not shared, or None, is itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def part_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """What this rank has of `whole`, where ranks share it as they share `parameter`. Nothing is sent."""
    if not isinstance(parameter, DTensor):
        return whole
    whole = whole.to(parameter.device_mesh.device_type)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
