"""Prompts of decoding in pages: their keys and values are written into the pages of their rows, in packed passes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridflow.models.continued_prefill import PagedContinuedPlan
from hybridflow.models.forward import Forward
from hybridflow.models.kernels.triton_support import generation_kernels
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedKVCache, PagedPrefillPlan
from hybridflow.models.varlen import upload
from hybridflow.rollout.decoding_batch import split_by_tokens
from hybridflow.rollout.running_row import RunningRow, shared_pages


@dataclass(frozen=True)
class Prefill:
    """Tokens whose keys and values are written for several rows, except those before `start`, which are kept ones.

    True: the row's shared pages are written already.
    """

    tokens: Sequence[int]
    rows: Sequence[tuple[RunningRow, bool]]
    start: int = 0


def write_prompts(
    forward: Forward, cache: PagedKVCache, device: torch.device, parts: Sequence[Prefill], *, notes_routes: bool
) -> None:
    """Write keys and values of sequences into the pages of their rows, and states, in passes of a bounded size.

    `notes_routes`: their routes, if recorded, are added to those of the rows.
    """
    cache.reset_states([row.place for part in parts for row, _ in part.rows])
    for is_continued in (False, True):
        group = [part for part in parts if len(part.tokens) > part.start and bool(part.start) == is_continued]
        first = 0
        for count in split_by_tokens([len(part.tokens) - part.start for part in group]):
            written = group[first : first + count]
            _write_pass(forward, cache, device, written)
            if notes_routes and forward.routes is not None:
                lengths = [len(part.tokens) - part.start for part in written]
                for part, routes in zip(written, forward.routes.cpu().split(lengths), strict=True):
                    for row, _ in part.rows:
                        row.routes.append(routes)
            first += count


def _write_pass(forward: Forward, cache: PagedKVCache, device: torch.device, parts: Sequence[Prefill]) -> None:
    lengths = [len(part.tokens) - part.start for part in parts]
    tokens, slots = [], []  # of copies of packed tokens
    for first, part in zip(np.cumsum([0, *lengths]), parts, strict=False):
        for row, has_shared in part.rows:
            written = shared_pages(row.request) * PAGE_SIZE if has_shared else 0
            places = np.arange(max(written, part.start), len(part.tokens))
            tokens.append(first + places - part.start)
            slots.append(np.array(row.pages)[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE)
    ids = np.concatenate([np.array(part.tokens[part.start :]) for part in parts])
    positions = np.concatenate([np.arange(part.start, len(part.tokens)) for part in parts])
    prompts, rows = np.array([(i, row.place) for i, part in enumerate(parts) for row, _ in part.rows]).T
    columns = (ids, positions, np.concatenate(tokens), np.concatenate(slots), prompts.copy(), rows.copy())
    ids, positions, tokens, slots, prompts, rows = (upload(column, device) for column in columns)
    if parts[0].start:
        pages = [part.rows[0][0].pages for part in parts]
        plan = PagedContinuedPlan(cache, tokens, slots, pages, [len(part.tokens) for part in parts], lengths)
    else:
        plan = PagedPrefillPlan(cache, lengths, tokens, slots, prompts, rows)
    with generation_kernels():
        forward(
            ids[None],
            position_ids=positions[None],
            attention_plan=plan,
            logits_to_keep=torch.zeros(0, dtype=torch.int64, device=device),
        )
