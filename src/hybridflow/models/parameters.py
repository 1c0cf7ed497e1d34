"""The layers of a model, and operations on its parameters: replacing them, and this rank's shard of new contents."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter by `make(name, parameter)`, called once for tied parameters, which stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = make(f"{module_name}.{name}", parameter)
            setattr(module, name, made[parameter])


def part_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of `whole`, sharded as `parameter` is, without communication."""
    if not isinstance(parameter, DTensor):
        return whole
    whole = whole.to(parameter.device_mesh.device_type)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are part of a model's files, such as the bias of a router. They do not learn."""
    stored = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def layers_of(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Return the layers of a model's text part."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    return list(max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=[]))
