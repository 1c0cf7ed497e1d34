"""Triton kernels of paged attention with one query per row (Kwon et al., 2023), split over keys as in Flash-Decoding.

A row's keys are split into parts of SPLIT tokens, whatever the other rows are; parts are computed in parallel and then
merged in order. So the result of a row depends on the row alone. Products accumulate in float32. Kernels read the
addresses of the pages from memory, so a CUDA graph of them can be replayed on other pages.
"""

# PyTorch for CUDA brings Triton, PyTorch for CPUs does not.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 256
"""Tokens of a part; a program reads them in blocks of BLOCK."""
BLOCK = 64
SMALLEST_PRODUCT = 16
"""The smallest size of a matrix product; fewer queries or dimensions are padded."""


def append(key: Tensor, value: Tensor, addresses: Tensor, slots: Tensor) -> None:
    """Write keys and values into pages, see `append_to_pages`; both have one shape, and the dtype of the pages."""
    tokens, kv_heads, dim = key.shape
    key, value = (x if x.stride(2) == 1 and x.stride(1) == dim else x.contiguous() for x in (key, value))
    size = kv_heads * dim
    if tokens:
        _append[(tokens,)](
            *(key, value, addresses, slots),
            *(key.stride(0), value.stride(0), size),
            BLOCK=triton.next_power_of_2(size),
        )


def attend(
    query: Tensor,
    addresses: Tensor,
    tables: Tensor,
    counts: Tensor,
    scaling: float,
    *,
    page_size: int,
    kv_heads: int,
    merges: bool = False,
) -> Tensor:
    """Compute attention, see `paged_attention`; keys and values have one shape, and are contiguous.

    A single part is written as the output, unless it `merges` always: then one compiled kernel computes any tables.
    """
    rows, heads, dim = query.shape
    group, num_parts = heads // kv_heads, -(-tables.shape[1] * page_size // SPLIT)
    query = query if query.stride(2) == 1 and query.stride(1) == dim else query.contiguous()
    out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    merges = merges or num_parts > 1
    partial = query.new_empty(rows, heads, num_parts, dim, dtype=torch.float32) if merges else out
    normalizers = query.new_empty(rows, heads, num_parts, dtype=torch.float32)
    padded = max(SMALLEST_PRODUCT, triton.next_power_of_2(dim))
    _attend_to_part[(rows, kv_heads, num_parts)](
        *(query, addresses, tables, counts, partial, normalizers),
        *(query.stride(0), tables.stride(0), scaling, num_parts),
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED_GROUP=max(SMALLEST_PRODUCT, triton.next_power_of_2(group)),
        DIM=dim,
        PADDED_DIM=padded,
        PAGE_SIZE=page_size,
        SPLIT=SPLIT,
        BLOCK=BLOCK,
    )
    if merges:
        _merge_parts[(rows, heads)](
            *(partial, normalizers, counts, out, num_parts),
            HEADS=heads,
            DIM=dim,
            PADDED_DIM=padded,
            SPLIT=SPLIT,
        )
    return out


@triton.jit
def _pages(addresses, like):
    """Return the pointers to the pages of a layer's keys and values, of the type that `like` points to."""
    kind = tl.pointer_type(like.dtype.element_ty)
    keys, values = tl.load(addresses).to(kind), tl.load(addresses + 1).to(kind)
    return tl.multiple_of(keys, 16), tl.multiple_of(values, 16)  # so that several numbers are read at once


@triton.jit
def _append(key, value, addresses, slots, key_stride, value_stride, size, BLOCK: tl.constexpr):
    """Copy one token, (kv_heads * dim) contiguous numbers, to its slot."""
    keys, values = _pages(addresses, key)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    offset = tl.arange(0, BLOCK)
    is_valid = offset < size
    tl.store(keys + slot * size + offset, tl.load(key + token * key_stride + offset, mask=is_valid), mask=is_valid)
    new = tl.load(value + token * value_stride + offset, mask=is_valid)
    tl.store(values + slot * size + offset, new, mask=is_valid)


@triton.jit(do_not_specialize=["query_stride", "table_stride", "num_parts"])
def _attend_to_part(
    query,
    addresses,
    tables,
    counts,
    partial,
    normalizers,
    query_stride,
    table_stride,
    scaling,
    num_parts,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend from the queries of one key-value head to one part of a row; write the output and log-normalizer."""
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + row).to(tl.int32)
    first = part * SPLIT
    if first < count:
        keys, values = _pages(addresses, query)
        head, dim = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM)
        is_query = (head[:, None] < GROUP) & (dim[None, :] < DIM)
        offset = (kv_head * GROUP + head)[:, None] * DIM + dim[None, :]
        q = tl.load(query + row * query_stride + offset, mask=is_query, other=0.0)
        largest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
        total = tl.zeros([PADDED_GROUP], tl.float32)
        out = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
        for block in range(SPLIT // BLOCK):  # blocks after the last token are masked, and change nothing
            token = first + block * BLOCK + tl.arange(0, BLOCK)
            is_seen = token < count
            page = tl.load(tables + row * table_stride + token // PAGE_SIZE, mask=is_seen, other=0).to(tl.int64)
            place = (page * PAGE_SIZE + token % PAGE_SIZE) * KV_HEADS + kv_head
            where = place[:, None] * DIM + dim[None, :]
            is_entry = is_seen[:, None] & (dim[None, :] < DIM)
            k = tl.load(keys + where, mask=is_entry, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            shrink = tl.exp(largest - new_largest)
            weights = tl.exp(scores - new_largest[:, None])
            v = tl.load(values + where, mask=is_entry, other=0.0)
            out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            largest = new_largest
        entry = (row * KV_HEADS * GROUP + kv_head * GROUP + head) * num_parts + part
        where = partial + entry[:, None] * DIM + dim[None, :]
        tl.store(where, (out / total[:, None]).to(partial.dtype.element_ty), mask=is_query)
        tl.store(normalizers + entry, largest + tl.log(total), mask=head < GROUP)


@triton.jit(do_not_specialize=["num_parts"])
def _merge_parts(
    partial,
    normalizers,
    counts,
    out,
    num_parts,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Merge the parts of one head of a row in order, each weighted by its share of the normalizer."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, PADDED_DIM)
    entry = (row * HEADS + head) * num_parts
    largest = tl.load(normalizers + entry)
    total = 1.0
    merged = tl.load(partial + entry * DIM + dim, mask=dim < DIM, other=0.0)
    count = tl.load(counts + row).to(tl.int32)
    for part in range(1, num_parts):
        is_part = part * SPLIT < count
        normalizer = tl.load(normalizers + entry + part, mask=is_part, other=float("-inf"))
        new_largest = tl.maximum(largest, normalizer)
        shrink, weight = tl.exp(largest - new_largest), tl.exp(normalizer - new_largest)
        new = tl.load(partial + (entry + part) * DIM + dim, mask=is_part & (dim < DIM), other=0.0)
        merged = merged * shrink + new * weight
        total = total * shrink + weight
        largest = new_largest
    merged = merged / total
    tl.store(out + (row * HEADS + head) * DIM + dim, merged.to(out.dtype.element_ty), mask=dim < DIM)
