"""The block mask of packed families: which blocks of keys each block of queries reads, without a mask of all pairs.

A family is a tuple of lengths: a trunk, then branches, each of which attends to the trunk and to itself. The blocks are
found on the host from the lengths alone, in memory of (tokens / 128) squared; `create_block_mask` of PyTorch finds the
same blocks from all pairs of tokens. FlexAttention computes under the mask; it is compiled once for all lengths.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hybridflow.models.varlen import upload

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


BLOCK = 128
"""Queries and keys of a block."""


def block_mask_of(families: Sequence[Sequence[int]], device: torch.device) -> BlockMask:
    """Build the block mask of packed families on a device, without waiting for the device.

    All lengths must be at least 1.
    """
    segments = _segments(families)
    starts, stops = segments[:2]
    tokens = int(stops[-1])
    partial, whole = _blocks(segments)
    tables = [_table(blocks, device) for blocks in (partial, whole, partial.T, whole.T)]
    # Separate tensors: views of one would not be aligned, and compiled code copies such arguments in each call.
    bounds = (np.repeat(bound, stops - starts).astype(np.int32) for bound in (starts, *segments[2:]))
    return BlockMask(
        (tokens, tokens),
        *(tensor for table in tables for tensor in table),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_mask_of(*(upload(bound, device) for bound in bounds)),
    )


def _table(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of each row, (1, 1, blocks), and their indices first, (1, 1, blocks, blocks)."""
    rows = upload(np.ascontiguousarray(blocks), device).to(torch.int32)[None, None]
    return rows.sum(-1, dtype=torch.int32), rows.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def _mask_of(own_starts: Tensor, trunk_starts: Tensor, trunk_stops: Tensor):
    """Return the mask of single tokens; the arguments are (tokens,) each, of the segment of a query."""

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_of_trunk = (key >= trunk_starts[query]) & (key < trunk_stops[query])
        return (key <= query) & ((key >= own_starts[query]) | is_of_trunk)

    return is_seen


def _segments(families: Sequence[Sequence[int]]) -> np.ndarray:
    """Return start and stop of each trunk and branch, and start and stop of the trunk it attends to, (4, segments).

    A trunk attends to no trunk but itself, so its last two numbers are both its start.
    """
    columns, start = [], 0
    for trunk, *branches in families:
        stop = start + trunk
        columns.append((start, stop, start, start))
        trunk_bounds, start = (start, stop), stop
        for branch in branches:
            columns.append((start, start + branch, *trunk_bounds))
            start += branch
    return np.array(columns, dtype=np.int64).T


def _blocks(segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks of keys each block of queries reads in part, and which as a whole: (blocks, blocks) bool."""
    starts, stops, trunk_starts, trunk_stops = segments
    tokens = stops[-1]
    num_blocks = -(-tokens // BLOCK)
    # Each piece is the part of a segment in one block of queries: `first` to `last`, inclusive.
    num_pieces = (stops - 1) // BLOCK - starts // BLOCK + 1
    of = np.repeat(np.arange(len(starts)), num_pieces)
    block = np.arange(len(of)) - np.repeat(num_pieces.cumsum() - num_pieces, num_pieces) + starts[of] // BLOCK
    first = np.maximum(starts[of], block * BLOCK)
    last = np.minimum(stops[of], (block + 1) * BLOCK) - 1

    def count(*intervals: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Count for each block of queries the pieces whose intervals of key blocks [begin, end) include a block."""
        changes = np.zeros((num_blocks, num_blocks + 1), dtype=np.int32)
        for begin, end in intervals:
            np.add.at(changes, (block, begin), 1)
            np.add.at(changes, (block, np.maximum(begin, end)), -1)
        return changes[:, :-1].cumsum(axis=1)

    trunk = trunk_starts[of] // BLOCK, -(-trunk_stops[of] // BLOCK)
    has_trunk = trunk_stops[of] > trunk_starts[of]
    is_read = count((trunk[0], np.where(has_trunk, trunk[1], 0)), (starts[of] // BLOCK, last // BLOCK + 1)) > 0
    # Keys that all queries of a piece see: the trunk, and the piece's segment up to the first query. They are one
    # interval if the segment follows its trunk.
    follows = trunk_stops[of] == starts[of]
    own = np.where(follows, trunk_starts[of], starts[of])
    inner_trunk = -(-trunk_starts[of] // BLOCK), np.where(follows, 0, trunk_stops[of] // BLOCK)
    num_seeing = count(inner_trunk, (-(-own // BLOCK), (first + 1) // BLOCK))
    is_whole = (num_seeing == np.bincount(block, minlength=num_blocks)[:, None]) & is_read
    is_whole[tokens // BLOCK :] = False  # a last block that is not filled
    return is_read & ~is_whole, is_whole
