"""What the matrix product of this machine allows: the FLOPs that a task needs, over the peak measured beside it.

The peak is that of torch's own product; a side whose kernels are better than torch's can be above it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hybridflow.models import DTYPES, DecoderShape, forward_flops
from hybridflow.runtime import measure_peak_flops

PEAK_SIZES = (1024, 2048)
"""Rows of the square matrices tried; which is faster differs by machine and dtype."""


class Peaks:
    """FLOP/s of a matrix product by dtype name: the best of all measurements of a run."""

    def __init__(self) -> None:
        self.flops_per_s: dict[str, float] = {}

    def measure(self, dtypes: Iterable[str]) -> None:
        for dtype in dtypes:
            rates = [measure_peak_flops(DTYPES[dtype], size) for size in PEAK_SIZES]
            self.flops_per_s[dtype] = max(self.flops_per_s.get(dtype, 0.0), *rates)


def generation_flops(shape: DecoderShape, prompt_len: int, new_tokens: Sequence[int], group_size: int = 1) -> float:
    """Forward FLOPs that generation needs. `new_tokens`: one length for each response.

    Each `group_size` responses share a prompt, which need be computed only once. Logits are needed where a token is
    drawn, and the last token of a response is never read.
    """
    body = _without_lm_head(shape)
    whole = forward_flops(body, _positions_read(prompt_len, new_tokens))
    num_repeated_prompts = len(new_tokens) - len(new_tokens) // group_size
    return whole - num_repeated_prompts * forward_flops(body, [prompt_len]) + _lm_head_flops(shape, sum(new_tokens))


def update_flops(shape: DecoderShape, prompt_len: int, new_tokens: Sequence[int], group_size: int = 1) -> float:
    """FLOPs that a forward and a backward pass need: of the same positions, a backward pass being two forward ones."""
    return 3.0 * generation_flops(shape, prompt_len, new_tokens, group_size)


def _without_lm_head(shape: DecoderShape) -> DecoderShape:
    return replace(shape, vocab_size=0)


def _lm_head_flops(shape: DecoderShape, num_tokens: int) -> float:
    return 2.0 * shape.hidden_size * shape.vocab_size * num_tokens


def _positions_read(prompt_len: int, new_tokens: Sequence[int]) -> list[int]:
    return [prompt_len + count - 1 for count in new_tokens]
