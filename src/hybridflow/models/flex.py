"""Attention under a block mask by FlexAttention, compiled once for all numbers of tokens."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BACKEND = "inductor"
"""The backend of torch.compile; tests replace it."""

MAX_VARIANTS = 64
"""Number of compiled variants that a process may hold. Each combination of head dimension, numbers of heads, dtype, and
training or not is one; torch's limit of 8 is too low for several roles in a process."""


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float) -> Tensor:
    """Compute attention under a block mask, (1, heads, tokens, value_dim); see `supports_flex`.

    query (1, heads, tokens, head_dim); key and value (1, kv_heads, tokens, head_dim or value_dim).
    """
    options = {"BACKEND": "TRITON"}  # the same kernel for few tokens, for which AUTO compiles a second one
    return _compiled(BACKEND)(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=True, kernel_options=options
    )


@cache
def _compiled(backend: str) -> Callable[..., Tensor]:
    """Compile FlexAttention for any number of tokens.

    `fullgraph`: an error instead of the slow version that needs memory for all pairs of tokens.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
