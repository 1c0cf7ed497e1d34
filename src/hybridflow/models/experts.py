"""The experts of a mixture: how their matrix products are computed, and how many tokens each of them gets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridflow.models.config_values import EXPERTS

ALIGNED = 8
"""Sizes of matrices whose rows begin at multiples of 16 bytes in bfloat16, which torch's grouped products need."""


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold the experts of a layer, in the order of the layers.

    They are those of transformers' `use_experts_implementation`, called with (hidden, experts of each token, weights).
    """
    return [module for module in model.modules() if "_is_expert_parallel" in vars(module)]


def choose_products(model: PreTrainedModel) -> None:
    """Let transformers compute the experts one after another where torch cannot compute their products together.

    Grouped products are its default: tokens are sorted by expert, so that each expert is one product of its tokens.
    torch computes them in float32 and bfloat16, for aligned sizes.
    """
    matrices = [p for experts in experts_of(model) for p in experts.parameters(recurse=False) if p.ndim == 3]
    if any(p.dtype == torch.float64 or p.shape[1] % ALIGNED or p.shape[2] % ALIGNED for p in matrices):
        model.set_experts_implementation("eager")


class ExpertLoad:
    """The number of tokens that each expert of each layer computes, counted on the device."""

    def __init__(self, experts: list[nn.Module], num_experts: int, device: torch.device) -> None:
        self._counts = torch.zeros(len(experts), num_experts, dtype=torch.float64, device=device)
        self._is_counting = False
        self._is_real: Tensor | None = None
        for layer, module in enumerate(experts):
            module.register_forward_pre_hook(partial(self._count, layer))

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device) -> "ExpertLoad | None":
        """Return the load of a model's experts, without counts; None for a model without experts."""
        experts, sizes = experts_of(model), sizes_of_experts(model.config)
        return cls(experts, sizes[1], device) if experts and sizes else None

    def reset(self) -> None:
        """Forget all counts."""
        self._counts.zero_()

    @contextmanager
    def counting(self, is_real: Tensor | None) -> Iterator[None]:
        """Count the tokens of a forward pass; `is_real` (batch, tokens): those that are not padding; None: all."""
        self._is_counting, self._is_real = True, is_real
        try:
            yield
        finally:
            self._is_counting, self._is_real = False, None

    @torch.no_grad()
    def _count(self, layer: int, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if not self._is_counting:
            return
        chosen = arguments[1]  # (tokens, experts of a token)
        is_chosen = chosen.unsqueeze(-1) == torch.arange(self._counts.shape[1], device=chosen.device)
        if self._is_real is not None:
            is_chosen &= self._is_real.reshape(-1, 1, 1)
        self._counts[layer] += is_chosen.sum((0, 1))

    def figures(self, ranks_sum: Callable[[list[float]], list[float]]) -> dict[str, float]:
        """Return the largest load of an expert in a layer as a multiple of the mean, and the number of idle experts."""
        summed = ranks_sum(self._counts.flatten().tolist())
        counts = torch.tensor(summed, dtype=torch.float64).view(self._counts.shape)
        loads = counts / counts.mean(-1, keepdim=True).clamp(min=1e-9)
        return {"expert_load_max": float(loads.max()), "idle_experts": float((counts == 0).sum())}


def sizes_of_experts(config: PretrainedConfig) -> tuple[int, int] | None:
    """Return the number of experts that compute a token, and that of all experts of a layer; None without experts.

    Shared experts, which compute every token, do not count.
    """
    text = config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None)
    experts = next((number for name in EXPERTS if (number := getattr(text, name, None))), None)
    return (chosen, experts) if isinstance(chosen, int) and isinstance(experts, int) else None
