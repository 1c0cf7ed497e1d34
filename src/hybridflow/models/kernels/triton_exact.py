"""Triton kernels whose result for a row depends on no other row: products of linear layers, and log-probs.

Every call has tiles of one shape, and one order of sums: products add over the inputs in blocks, without split sums. So
few rows and many have the same bits. Number of rows and alignment do not choose another compiled kernel.
"""

# PyTorch for CUDA brings Triton, PyTorch for CPUs does not.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.models.kernels.triton_support import aligned

TILES = {2: (128, 64, 64), 4: (64, 64, 32)}
"""Rows, outputs and inputs of a tile, by the bytes of a number."""
GROUP = 8
"""Tiles of rows that are computed next to each other, for the same outputs."""
CHUNK = 2048
"""Entries of the vocabulary that are added at once."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Compute `exact_linear`, without gradient."""
    (rows, inputs), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs)
    size_m, size_n, size_k = TILES[x.element_size()]
    if rows:
        _linear[(triton.cdiv(rows, size_m), triton.cdiv(outputs, size_n))](
            *(None if each is None else aligned(each) for each in (x, weight, bias, residual)),
            *(out, rows, outputs, inputs),
            SIZE_M=size_m,
            SIZE_N=size_n,
            SIZE_K=size_k,
            GROUP=GROUP,
            num_warps=4,
            num_stages=3,
        )
    return out


def log_probs(
    logits: Tensor, labels: Tensor, inverses: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probs at labels of softmax(inverse * logits), logs of the normalizers, and entropies or None.

    logits (rows, vocabulary); labels (rows,) int64; inverses (rows, 1) float32; results (rows,) float32.
    """
    logits, (rows, vocabulary) = aligned(logits), logits.shape
    found, normalizers, entropies = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    if rows:
        _log_probs[(rows,)](
            *(logits, labels.contiguous(), inverses.contiguous(), found, normalizers, entropies, vocabulary),
            CHUNK=CHUNK,
            num_warps=8,
        )
    return found, normalizers, entropies if with_entropy else None


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    outputs,
    inputs,
    SIZE_M: tl.constexpr,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    i, j = tl.swizzle2d(tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), GROUP)
    row, output = i * SIZE_M + tl.arange(0, SIZE_M), j * SIZE_N + tl.arange(0, SIZE_N)
    is_row, is_output = (row < rows)[:, None], (output < outputs)[None, :]
    row, output = row.to(tl.int64)[:, None], output.to(tl.int64)[None, :]
    total = tl.zeros([SIZE_M, SIZE_N], tl.float32)
    for first in range(0, inputs, SIZE_K):
        k = first + tl.arange(0, SIZE_K)
        is_input = k < inputs
        left = tl.load(x + row * inputs + k[None, :], mask=is_row & is_input[None, :], other=0.0)
        right = tl.load(weight + output * inputs + k[:, None], mask=is_output & is_input[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    place, is_entry = row * outputs + output, is_row & is_output
    if residual is not None:
        total += tl.load(residual + place, mask=is_entry, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_entry)


@triton.jit
def _log_probs(logits, labels, inverses, found, normalizers, entropies, vocabulary, CHUNK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNK)
    logits += row * vocabulary
    inverse = tl.load(inverses + row)
    largest = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in range(0, vocabulary, CHUNK):
        x = tl.load(logits + first + i, mask=first + i < vocabulary, other=float("-inf")).to(tl.float32) * inverse
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    sums, means = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for first in range(0, vocabulary, CHUNK):
        x = tl.load(logits + first + i, mask=first + i < vocabulary, other=float("-inf")).to(tl.float32) * inverse - top
        weights = tl.exp(x)
        sums += weights
        means += weights * tl.where(weights > 0, x, 0.0)
    total = tl.sum(sums, 0)
    log_total = tl.log(total)
    chosen = tl.load(logits + tl.load(labels + row)).to(tl.float32) * inverse
    tl.store(found + row, chosen - top - log_total)
    tl.store(normalizers + row, top + log_total)
    tl.store(entropies + row, log_total - tl.sum(means, 0) / total)
