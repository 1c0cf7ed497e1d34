"""Attention of one new token per row to keys and values in pages: a Triton kernel on a GPU, else PyTorch.

A page holds the keys (or values) of `page_size` consecutive tokens of one row, (page_size, kv_heads, dim); a row's
table lists its pages in the order of its tokens.
"""

import torch
from torch import Tensor

from hybridflow.models.kernels.triton_support import runs_triton

PAGE_SIZE = 32
"""Tokens in a page."""

LARGEST_HEAD_BYTES = 512
"""Largest size of one head's key in the Triton kernel, whose blocks must fit into shared memory."""


def addresses_of(keys: Tensor, values: Tensor) -> Tensor:
    """Return the addresses of a layer's pages as the kernels read them, (2,) int64."""
    return torch.tensor([keys.data_ptr(), values.data_ptr()], device=keys.device)


def looks_up_addresses(keys: Tensor, values: Tensor) -> bool:
    """Whether kernels serve these pages, and read their `addresses_of` from memory each time they run."""
    is_small = keys.shape == values.shape and keys.shape[-1] * keys.element_size() <= LARGEST_HEAD_BYTES
    return is_small and runs_triton(keys)


def append_to_pages(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, addresses: Tensor | None = None
) -> None:
    """Write keys and values (tokens, kv_heads, dim) into pages (pages, page_size, kv_heads, dim).

    slots: (tokens,) int64, distinct; token i goes to place `slots[i] % page_size` of page `slots[i] // page_size`.
    `addresses`: those of the pages, if they are on the device already.
    """
    if runs_triton(key) and key.shape == value.shape:
        from hybridflow.models.kernels.triton_paged_attention import append

        append(key, value, addresses_of(keys, values) if addresses is None else addresses, slots)
        return
    keys.flatten(0, 1).index_copy_(0, slots, key)
    values.flatten(0, 1).index_copy_(0, slots, value)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    counts: Tensor,
    scaling: float,
    addresses: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """Compute the attention of each row's query to the row's first `counts` tokens, (rows, heads, value_dim).

    query (rows, heads, dim); keys and values (pages, page_size, kv_heads, dim or value_dim), where kv_heads divides
    heads; tables (rows, pages per row) int32; counts (rows,) int64, from 1 to the tokens of a whole table. Entries of
    a table after the row's last page, and places after its last token, are not used. `addresses`: those of the pages,
    if they are on the device already. `exact`: kernels do not depend on the width of the tables. No gradient.
    """
    if looks_up_addresses(keys, values):
        from hybridflow.models.kernels.triton_paged_attention import attend

        addresses = addresses_of(keys, values) if addresses is None else addresses
        sizes = {"page_size": keys.shape[1], "kv_heads": keys.shape[2]}
        return attend(query, addresses, tables, counts, scaling, **sizes, merges=exact)
    return _by_gathering(query, keys, values, tables, counts, scaling)


def _by_gathering(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, counts: Tensor, scaling: float
) -> Tensor:
    """Copy the pages of each row side by side, and attend by two matrix products in float32 or float64."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows, heads, _ = query.shape
    key, value = (x[tables.long()].flatten(1, 2).transpose(1, 2).to(dtype) for x in (keys, values))
    kv_heads, longest = key.shape[1:3]  # key (rows, kv_heads, longest, dim)
    unseen = torch.arange(longest, device=counts.device) >= counts[:, None]
    grouped = (query.to(dtype) * scaling).reshape(rows, kv_heads, heads // kv_heads, -1)
    weights = (grouped @ key.mT).masked_fill(unseen[:, None, None], -torch.inf).softmax(-1)
    value = value.masked_fill(unseen[:, None, :, None], 0.0)  # unused places may hold NaN
    return (weights @ value).flatten(1, 2).to(query.dtype)
