"""The optimizer: AdamW and its state by name, master parameters, the learning rate and gradient clipping."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hybridflow.config import OptimizerConfig
from hybridflow.engines.ranks import SHARD, TENSOR, Ranks


def build_adamw(parameters: Mapping[str, Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW (Loshchilov and Hutter, 2019), without weight decay for norms and biases, also stacked ones."""
    groups: dict[tuple[bool, Any], list[Tensor]] = {}  # one kernel takes shards of one mesh
    for name, parameter in sorted(parameters.items(), key=lambda named: named[1].ndim <= 1):
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim > 1 and not name.endswith("bias"), mesh), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": p, "weight_decay": config.weight_decay * is_matrix} for (is_matrix, _), p in groups.items()],
        lr=config.lr,
        betas=config.betas,
        eps=config.epsilon,
        fused=True,
    )


class MasterParameters:
    """The parameters by name, as the optimizer changes them: the model's own unless it computes in bfloat16.

    Then they are float32 masters, and the model has their bfloat16 cast. Gradients are added to the masters in float32
    as soon as they are computed, so that accumulation over micro-batches does not round. One cast per update follows.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        self.by_name: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        if compute_dtype != torch.bfloat16:
            return
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.detach().clone())
            self.by_name[name] = master
            self._pairs.append((master, parameter))
            # Buffers, such as rotary frequencies, keep their precision.
            parameter.data = parameter.data.to(compute_dtype)
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))

    @torch.no_grad()
    def cast(self) -> None:
        """Copy the masters to the model's parameters."""
        if self._pairs:
            masters, parameters = zip(*self._pairs, strict=True)
            torch._foreach_copy_(parameters, masters)  # pyright: ignore[reportPrivateImportUsage]


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the rate of step `step` (from 0): linear warm-up to lr, then the schedule down to min_lr_ratio * lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, ranks: Ranks) -> float:
    """Scale the gradients to a norm over all parameters and ranks of at most `max_norm`; return the norm before."""
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    if ranks.is_alone:
        return float(torch.nn.utils.clip_grad_norm_(learning, max_norm, foreach=True))
    gradients = {is_sharded: [] for is_sharded in (True, False)}
    for parameter in learning:
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        is_sharded = ranks.tensor == 1 or isinstance(gradient.placements[-1], Shard)
        gradients[is_sharded].append(gradient.to_local())
    # Gradients that all tensor parallel ranks have are counted on the first of these ranks.
    counted = gradients[True] + (gradients[False] if ranks.place(TENSOR) == 0 else [])
    own = float(torch.nn.utils.get_total_norm(counted, foreach=True)) ** 2
    norm = ranks.sum_floats([own], (SHARD, TENSOR))[0] ** 0.5
    scale = min(max_norm / (norm + 1e-6), 1.0)  # as in torch.nn.utils.clip_grad_norm_
    for gradient in gradients[True] + gradients[False]:
        gradient.mul_(scale)
    return norm


def moments_by_name(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, Tensor], stored: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Return moments and step count of each parameter that has them, as `stored` finds their contents."""
    moments = optimizer.state
    return {
        name: {key: stored(moment) for key, moment in moments[parameter].items()}
        for name, parameter in parameters.items()
        if parameter in moments
    }


def allocate_moments(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, Tensor], described: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Replace the optimizer's state by zeros in the shapes of a stored one, for this rank's shards."""
    optimizer.state.clear()
    for name, moments in described.items():
        parameter = parameters[name].detach()
        step = torch.zeros(
            (), dtype=torch.float32, device=parameter.device
        )  # also of a DTensor: fused AdamW expects it
        optimizer.state[parameters[name]] = {
            key: torch.zeros_like(parameter) if value.ndim else step for key, value in moments.items()
        }


def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a parameter's new gradient to its master's gradient, and clear it."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
