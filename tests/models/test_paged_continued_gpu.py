"""Attention of new tokens to kept pages on a CUDA device, by flash attention or padded, equals that in float64."""

import pytest
import torch

from hybridflow.models import continued_prefill
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.continued_prefill import PagedContinuedPlan
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedKVCache, pages_of

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
LENGTHS, COUNTS = [1, 2, 33, 64, 300, 70, 1000], [1, 1, 20, 64, 12, 1, 500]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("copied_bytes", [1, 2**19, 2**28])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (4, 4, 128)])
@torch.no_grad()
def test_new_tokens_see_all_tokens_before_them(gpu, monkeypatch, dtype, heads, kv_heads, dim, copied_bytes):
    monkeypatch.setattr(continued_prefill, "COPIED_BYTES", copied_bytes)
    like = PrefillPlan([1])
    like.keys[0] = like.values[0] = torch.zeros(1, kv_heads, dim, dtype=dtype, device=gpu)
    cache = PagedKVCache(like, sum(map(pages_of, LENGTHS)), 1)
    whole = [[normal(length, n, dim) for n in (heads, kv_heads, kv_heads)] for length in LENGTHS]
    pages = [cache.table.take(pages_of(length))[::-1] for length in LENGTHS]
    slots = [
        [of[n // PAGE_SIZE] * PAGE_SIZE + n % PAGE_SIZE for n in range(m)] for of, m in zip(pages, LENGTHS, strict=True)
    ]
    for stored in (cache.keys[0], cache.values[0]):
        stored.fill_(torch.nan)  # places without a token are not read
    for (_, key, value), of, count in zip(whole, slots, COUNTS, strict=True):
        for stored, x in ((cache.keys[0], key), (cache.values[0], value)):
            stored.flatten(0, 1)[of[:-count]] = x[:-count].to(gpu, dtype)
    new = [
        torch.cat([x[i][-count:] for x, count in zip(whole, COUNTS, strict=True)]).to(gpu, dtype).transpose(0, 1)[None]
        for i in range(3)
    ]
    written = torch.tensor([slot for of, count in zip(slots, COUNTS, strict=True) for slot in of[-count:]], device=gpu)
    plan = PagedContinuedPlan(cache, torch.arange(len(written), device=gpu), written, pages, LENGTHS, COUNTS)
    for _ in range(2):  # as in two layers
        found = plan.attend(0, *new, AttentionForm(dim**-0.5))
    for (query, key, value), of_one, count in zip(whole, found[0].split(COUNTS), COUNTS, strict=True):
        key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query * dim**-0.5, key)
        seen = torch.ones(len(query), len(query)).tril().bool()
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)[-count:]
        torch.testing.assert_close(of_one.cpu().double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
