"""The Triton kernels of sampling: which tokens are kept, sums over blocks of the vocabulary, noise and the draw.

Sums have a fixed order, and no kernel uses atomic operations, so results are the same in each run.
"""

# PyTorch for CUDA brings Triton, PyTorch for CPUs does not.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.runtime.random_streams import GOLDEN, MULTIPLIER_1, MULTIPLIER_2

WIDE = 2048
"""Tokens that a program reads at once while it looks for the tokens that are kept."""
EQUAL_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""The number of last bits that are 0 in all numbers of a dtype as float32."""
LOWEST = tl.constexpr(-2139095041)
"""The key of minus infinity, see `_key`."""
INCREMENT = tl.constexpr(int(GOLDEN.astype("int64")))
FACTOR_1, FACTOR_2 = (tl.constexpr(int(word.astype("int64"))) for word in (MULTIPLIER_1, MULTIPLIER_2))


def sums_of_blocks(
    logits: Tensor, temperatures: Tensor, size: int, kept: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `block_sums` of the tokens that are `kept`, see `kept_tokens`; not for float64."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, size)
    largest = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if rows:
        _sums_of_blocks[(rows, blocks)](
            *(logits, temperatures, *(kept or (largest, largest)), largest, sums, logits.stride(0), vocabulary),
            IS_RESTRICTED=kept is not None,
            SIZE=size,
        )
    return largest, sums


def kept_tokens(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens are among the top k and in their nucleus: `floors` (rows,) float32 and `lasts` (rows,) int64.

    Kept are logits above the floor, and those equal to it of tokens up to the last one: of equal ones, the lower token
    ids. No sort: a bisection over all values that a logit can have finds the floor, by sums in float64.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    floors = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lasts = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _find_floors[(rows,)](
            *(logits, temperatures, top_k, top_p, floors, lasts, logits.stride(0), vocabulary),
            SHIFT=EQUAL_BITS[logits.dtype],
            SIZE=WIDE,
            CHUNKS=triton.cdiv(vocabulary, WIDE),
            num_warps=8,
        )
    return floors, lasts


def draw(
    logits: Tensor,
    states: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    restrictions: tuple[Tensor, Tensor] | None,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Compute `draw_rows`, with blocks of `size` tokens; `restrictions` are top_k and top_p. Not for float64."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    kept = kept_tokens(logits, temperatures, *restrictions) if restrictions else None
    largest, sums = sums_of_blocks(logits, temperatures, size, kept)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _draw[(rows,)](
            *(logits, temperatures, *(kept or (largest, largest)), largest, sums, states, positions),
            *(tokens, log_probs, logits.stride(0), vocabulary, largest.shape[1]),
            IS_RESTRICTED=kept is not None,
            SIZE=size,
            BLOCKS=triton.next_power_of_2(largest.shape[1]),
        )
    return tokens, log_probs


@triton.jit
def _temperature(temperatures, row):
    """Return what logits are divided by: 1 for greedy rows."""
    temperature = tl.load(temperatures + row)
    return tl.where(temperature == 0, 1.0, temperature).to(tl.float32)


@triton.jit
def _tempered(logits, temperature, floors, lasts, row, token, row_stride, vocabulary, IS_RESTRICTED: tl.constexpr):
    """Return tempered logits, minus infinity for tokens that do not exist or are not kept."""
    x = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    if IS_RESTRICTED:
        floor, last = tl.load(floors + row), tl.load(lasts + row)
        is_kept = (x > floor) | ((x == floor) & (token <= last)) | (x != x)
        x = tl.where(is_kept, x, float("-inf"))
    return x / temperature


@triton.jit
def _sums_of_blocks(
    logits,
    temperatures,
    floors,
    lasts,
    largest,
    sums,
    row_stride,
    vocabulary,
    IS_RESTRICTED: tl.constexpr,
    SIZE: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * SIZE + tl.arange(0, SIZE)
    temperature = _temperature(temperatures, row)
    x = _tempered(logits, temperature, floors, lasts, row, token, row_stride, vocabulary, IS_RESTRICTED)
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
    place = row * tl.num_programs(1) + block
    tl.store(largest + place, top)
    tl.store(sums + place, total.to(tl.float64))


@triton.jit
def _mix(x):
    """Apply the finalizer of splitmix64 to int64, whose shifts copy the sign."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FACTOR_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * FACTOR_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _first_over(weights, cumulative, threshold, COUNT: tl.constexpr):
    """Return the first index with a weight whose cumulative sum exceeds the threshold, else the last with a weight."""
    index, possible = tl.arange(0, COUNT), weights > 0
    first = tl.min(tl.where(possible & (cumulative > threshold), index, COUNT), 0)
    return tl.minimum(first, tl.max(tl.where(possible, index, 0), 0))


@triton.jit
def _draw(
    logits,
    temperatures,
    floors,
    lasts,
    largest,
    sums,
    states,
    positions,
    tokens,
    log_probs,
    row_stride,
    vocabulary,
    num_blocks,
    IS_RESTRICTED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Draw the token of a row: its block of the vocabulary first, then the token in it."""
    row, block, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS), tl.arange(0, SIZE)
    is_greedy = tl.load(temperatures + row) == 0
    temperature = _temperature(temperatures, row)
    bits = _mix(tl.load(states + row) ^ _mix(tl.load(positions + row) + INCREMENT))
    uniform = ((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * (1.0 / (1 << 53))
    high = tl.load(largest + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    top = tl.max(high, 0)
    shares = tl.load(sums + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    shares = shares * tl.exp(high - top).to(tl.float64)
    cumulative, total = tl.cumsum(shares, 0), tl.sum(shares, 0)
    threshold = uniform * total
    drawn = _first_over(shares, cumulative, threshold, BLOCKS)
    chosen = tl.where(is_greedy, tl.min(tl.where(high == top, block, num_blocks - 1), 0), drawn)
    threshold -= tl.sum(tl.where(block == chosen, cumulative - shares, 0.0), 0)
    token = chosen * SIZE + place
    x = _tempered(logits, temperature, floors, lasts, row, token, row_stride, vocabulary, IS_RESTRICTED)
    weights = tl.exp(x - top).to(tl.float64)
    drawn = _first_over(weights, tl.cumsum(weights, 0), threshold, SIZE)
    picked = tl.where(is_greedy, tl.min(tl.where(x == top, place, SIZE - 1), 0), drawn)
    value = tl.sum(tl.where(place == picked, x, 0.0), 0)
    tl.store(tokens + row, tl.minimum(chosen * SIZE + picked, vocabulary - 1).to(tl.int64))
    tl.store(log_probs + row, ((value - top).to(tl.float64) - tl.log(total)).to(tl.float32))


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Return int64 in the order of float32 numbers; `SHIFT` drops the bits that are the same in all of them."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # of both zeros
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """Return the number of a key."""
    bits = ((key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _read(logits, chunk, vocabulary, SIZE: tl.constexpr):
    """Return the tokens of a chunk and their logits."""
    token = chunk * SIZE + tl.arange(0, SIZE)
    return token, tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _weight(logit, temperature, top):
    """Return the probability of a logit relative to that of the largest one."""
    return tl.exp((logit / temperature).to(tl.float64) - (top / temperature).to(tl.float64))


@triton.jit
def _above(logits, temperature, top, bound, vocabulary, SHIFT: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the number of tokens whose keys are above the bound, and the sum of their weights."""
    count, mass = tl.zeros([SIZE], tl.int32), tl.zeros([SIZE], tl.float64)
    for chunk in range(CHUNKS):
        _, x = _read(logits, chunk, vocabulary, SIZE)
        is_above = _key(x, SHIFT) > bound
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, _weight(x, temperature, top), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _find_floors(
    logits,
    temperatures,
    top_k,
    top_p,
    floors,
    lasts,
    row_stride,
    vocabulary,
    SHIFT: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Find the smallest kept value of a row and the number of its tokens that are kept, then the last one of these."""
    row = tl.program_id(0).to(tl.int64)
    most, share = tl.load(top_k + row), tl.load(top_p + row)
    tl.store(floors + row, float("-inf"))
    tl.store(lasts + row, vocabulary)
    if (most > 0) | (share < 1):
        temperature = _temperature(temperatures, row)
        logits += row * row_stride
        keys = tl.full([SIZE], LOWEST >> SHIFT, tl.int64)
        for chunk in range(CHUNKS):
            _, x = _read(logits, chunk, vocabulary, SIZE)
            keys = tl.maximum(keys, _key(x, SHIFT))
        highest = tl.max(keys, 0)
        top = _value(highest, SHIFT)
        low = tl.full([], LOWEST >> SHIFT, tl.int64)
        if most > 0:  # the smallest bound with fewer than k tokens above it: the k-th largest key
            high = highest
            while low < high:
                middle = low + ((high - low) >> 1)
                count, _ = _above(logits, temperature, top, middle, vocabulary, SHIFT, SIZE, CHUNKS)
                low, high = tl.where(count < most, low, middle + 1), tl.where(count < most, middle, high)
        count, mass = _above(logits, temperature, top, low, vocabulary, SHIFT, SIZE, CHUNKS)
        ties = tl.where(most > 0, most - count, vocabulary)  # tokens of the k-th value that are kept
        if share < 1:
            limit = share * (mass + _weight(_value(low, SHIFT), temperature, top) * ties)
            least, high = low, highest
            while low < high:  # the smallest bound with less than the share above it
                middle = low + ((high - low) >> 1)
                _, mass = _above(logits, temperature, top, middle, vocabulary, SHIFT, SIZE, CHUNKS)
                low, high = tl.where(mass < limit, low, middle + 1), tl.where(mass < limit, middle, high)
            _, mass = _above(logits, temperature, top, low, vocabulary, SHIFT, SIZE, CHUNKS)
            each = _weight(_value(low, SHIFT), temperature, top)
            within = tl.ceil((limit - mass) / tl.where(each > 0, each, 1.0))  # those with less than the share before
            within = tl.minimum(tl.maximum(tl.where(each > 0, within, 1e9), 1.0), 1e9).to(tl.int64)
            ties = tl.where(low == least, tl.minimum(within, ties), within)
        seen, last = tl.zeros([], tl.int64), tl.full([], -1, tl.int64)
        for chunk in range(CHUNKS):
            token, x = _read(logits, chunk, vocabulary, SIZE)
            is_tie = (_key(x, SHIFT) == low) & (token < vocabulary)
            rank = seen + tl.cumsum(is_tie.to(tl.int64), 0)
            last = tl.maximum(last, tl.max(tl.where(is_tie & (rank <= ties), token, -1).to(tl.int64), 0))
            seen += tl.sum(is_tie.to(tl.int64), 0)
        tl.store(floors + row, _value(low, SHIFT))
        tl.store(lasts + row, last)
