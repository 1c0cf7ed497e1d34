"""The experts of a mixture: how their matrix products are computed, and how many tokens each of them gets."""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

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


def sizes_of_experts(config: PretrainedConfig) -> tuple[int, int] | None:
    """Return the number of experts that compute a token, and that of all experts of a layer; None without experts.

    Shared experts, which compute every token, do not count.
    """
    text = config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((number for name in names if (number := getattr(text, name, None))), None)
    return (chosen, experts) if isinstance(chosen, int) and isinstance(experts, int) else None
