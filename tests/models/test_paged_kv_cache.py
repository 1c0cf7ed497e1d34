import pytest
import torch

from hybridflow.models import PackedPlan
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.models.paged_kv_cache import (
    PAGE_SIZE,
    PagedDecodePlan,
    PagedKVCache,
    PagedPrefillPlan,
    PageTable,
    pages_of,
)

HEADS, KV_HEADS, DIM, SCALING = 4, 2, 3, 0.4


def random_tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, HEADS, count, DIM), (1, KV_HEADS, count, DIM), (1, KV_HEADS, count, DIM))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def empty_cache(num_pages: int) -> PagedKVCache:
    plan = PrefillPlan([1])
    plan.attend(0, *random_tokens(1, 0), SCALING)
    cache = PagedKVCache(plan, num_pages, num_scratch=1)
    cache.keys[0].fill_(torch.nan)  # unwritten memory may hold anything
    cache.values[0].fill_(torch.nan)
    assert PagedKVCache.page_bytes(plan) == 2 * PAGE_SIZE * KV_HEADS * DIM * 8
    return cache


def test_pages_return_to_the_free_ones_after_their_last_user():
    table = PageTable(first=3, count=4)
    pages = table.take(3)
    assert pages == [3, 4, 5]
    assert table.share(pages[:2]) == [3, 4]
    table.release(pages)
    assert table.num_free == 2
    table.release([4])
    assert sorted(table.take(table.num_free)) == [4, 5, 6]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (PAGE_SIZE, 1), (PAGE_SIZE + 1, 2)])
def test_pages_of_a_number_of_tokens(tokens, pages):
    assert pages_of(tokens) == pages


def test_decoding_in_pages_equals_attention_over_whole_sequences():
    prompts, new = [2, PAGE_SIZE - 1, 2 * PAGE_SIZE, PAGE_SIZE + 5], 3
    whole = [random_tokens(length + new, seed=length) for length in prompts]
    cache = empty_cache(12)
    rows = [cache.table.take(pages_of(length + new)) for length in prompts]
    rows[0], rows[3] = rows[0] + [0, 0], rows[3] + [0]
    tables = torch.tensor([row + [0] * (3 - len(row)) for row in rows], dtype=torch.int32)
    slots = [
        int(tables[i, n // PAGE_SIZE]) * PAGE_SIZE + n % PAGE_SIZE for i, p in enumerate(prompts) for n in range(p)
    ]
    packed = [torch.cat([x[i][:, :, :p] for x, p in zip(whole, prompts, strict=True)], dim=2) for i in range(3)]
    plan = PagedPrefillPlan(cache, prompts, torch.arange(sum(prompts)), torch.tensor(slots))
    out = plan.attend(0, *packed, SCALING)
    assert torch.equal(out, PackedPlan.from_lengths(prompts).attend(0, *packed, SCALING))
    expected = [PackedPlan.from_lengths([x[0].shape[2]]).attend(0, *x, SCALING)[0] for x in whole]
    lengths, running = torch.tensor(prompts), torch.tensor([True, True, False, True])
    for step in range(new):
        qkv = [
            torch.cat([x[i][:, :, p + step : p + step + 1] for x, p in zip(whole, prompts, strict=True)])
            for i in range(3)
        ]
        out = PagedDecodePlan(cache, tables, lengths, running).attend(0, *qkv, SCALING)
        assert out.shape == (4, 1, HEADS, DIM)
        for row in (0, 1, 3):
            torch.testing.assert_close(out[row, 0], expected[row][prompts[row] + step])
        lengths += running
    assert bool(cache.keys[0][rows[2][2]].isnan().all())  # the row that did not run wrote to a scratch page
