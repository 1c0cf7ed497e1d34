"""A lower bound of a task's time: the FLOPs that it needs over the peak of a matrix product, measured in the same run.

The peak is that of torch's matrix product; a side whose kernels are faster than torch's can exceed it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hybridflow.models.loading import DTYPES
from hybridflow.models.model_sizes import DecoderShape, forward_flops
from hybridflow.runtime.matmul_peak import measure_peak_flops

PEAK_SIZES = (1024, 2048)
"""Rows of the square matrices that are tried; which one is faster depends on the machine and the dtype."""


class Peaks:
    """FLOP/s of a matrix product by dtype name: the best of all measurements of a run."""

    def __init__(self, sizes: Sequence[int] = PEAK_SIZES) -> None:
        self.sizes = sizes
        self.flops_per_s: dict[str, float] = {}

    def measure(self, dtypes: Iterable[str]) -> None:
        """Measure each dtype once more and keep the best rate."""
        for dtype in dtypes:
            rates = [measure_peak_flops(DTYPES[dtype], size) for size in self.sizes]
            self.flops_per_s[dtype] = max(self.flops_per_s.get(dtype, 0.0), *rates)


def generation_flops(shape: DecoderShape, prompt_len: int, new_tokens: Sequence[int], group_size: int = 1) -> float:
    """Return the forward FLOPs that generation needs. `new_tokens`: one length for each response.

    Each `group_size` responses share a prompt, which is computed once. Logits are needed only where a token is
    sampled, and the last token of a response is never an input.
    """
    body = _without_lm_head(shape)
    total = forward_flops(body, _num_inputs(prompt_len, new_tokens))
    num_repeated_prompts = len(new_tokens) - len(new_tokens) // group_size
    return total - num_repeated_prompts * forward_flops(body, [prompt_len]) + _lm_head_flops(shape, sum(new_tokens))


def update_flops(shape: DecoderShape, prompt_len: int, new_tokens: Sequence[int], group_size: int = 1) -> float:
    """Return the FLOPs of a forward and a backward pass; a backward pass counts as two forward passes."""
    return 3.0 * generation_flops(shape, prompt_len, new_tokens, group_size)


def _without_lm_head(shape: DecoderShape) -> DecoderShape:
    return replace(shape, vocab_size=0)


def _lm_head_flops(shape: DecoderShape, num_tokens: int) -> float:
    return 2.0 * shape.hidden_size * shape.vocab_size * num_tokens


def _num_inputs(prompt_len: int, new_tokens: Sequence[int]) -> list[int]:
    return [prompt_len + count - 1 for count in new_tokens]
