"""The Triton kernel of sums over blocks of the vocabulary."""

# PyTorch for CUDA brings Triton, PyTorch for CPUs does not.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor


def sums_of_blocks(logits: Tensor, temperatures: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Compute `block_sums`; not for float64."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, size)
    largest = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    if rows:
        _sums_of_blocks[(rows, blocks)](
            *(logits, temperatures.float(), largest, sums, logits.stride(0), vocabulary), SIZE=size
        )
    return largest, sums


@triton.jit
def _sums_of_blocks(logits, temperatures, largest, sums, row_stride, vocabulary, SIZE: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperatures + row)
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
    place = row * tl.num_programs(1) + block
    tl.store(largest + place, top)
    tl.store(sums + place, total.to(tl.float64))
