"""AdamW with and without weight decay, and the learning rate as a pure function of the step."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.config import OptimizerConfig


def build_adamw(parameters: Mapping[str, Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW (Loshchilov and Hutter, 2019), without weight decay for one-dimensional tensors (norms, biases)."""
    decayed = [p for p in parameters.values() if p.ndim > 1]
    kept = [p for p in parameters.values() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True
    )


def empty_step_count(parameter: Tensor) -> Tensor:
    """Return a step count of zero where fused AdamW expects that of the parameter, which may be a DTensor."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device)


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
