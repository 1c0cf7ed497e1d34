"""Attention of new tokens to the known ones of their sequence equals that of the whole sequence."""

import pytest
import torch

from hybridflow.models.attention import PackedPlan
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.continued_prefill import ContinuedPlan
from hybridflow.models.kv_cache import KeysValues, KVCache

HEADS, KV_HEADS, DIM, FORM = 4, 2, 3, AttentionForm(0.4)


def tokens_of(counts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, sum(counts), DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("group_sizes", [[1, 1, 1, 1], [2, 1, 3, 1]])
@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([4, 4, 4, 4], [1, 1, 1, 1]), ([3, 9, 40, 5], [1, 8, 2, 4]), ([2, 2, 60, 61], [1, 1, 59, 1])],
)
def test_new_tokens_see_what_came_before_and_their_keys_are_in_the_rows(lengths, starts, group_sizes):
    whole = tokens_of(lengths)
    expected = PackedPlan.from_lengths(lengths).attend(0, *(x[None] for x in whole), FORM)[0].split(lengths)
    _, keys, values = (x.transpose(0, 1).split(lengths) for x in whole)
    parts = zip(keys, values, starts, strict=True)
    known = [KeysValues([k[:start]], [v[:start]], start, [None]) for k, v, start in parts]
    cache, source = KVCache(torch.device("cpu")), torch.arange(4).repeat_interleave(torch.tensor(group_sizes))
    cache.append_known(known[:1], lengths[:1], torch.tensor([0]), capacity=70, room=len(source))
    for storage in cache._storage:
        storage[0][1:] = torch.nan  # as memory that was never written
    cache.append_known(known, lengths, source, capacity=70)
    cut = [[x[start:] for x, start in zip(part.transpose(0, 1).split(lengths), starts, strict=True)] for part in whole]
    new = [torch.cat(part).transpose(0, 1)[None] for part in cut]
    out = ContinuedPlan(cache, 1, source, lengths, starts).attend(0, *new, FORM)[0]
    wanted = torch.cat([x[start:] for x, start in zip(expected, starts, strict=True)])
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    for row, i in enumerate(source.tolist(), 1):
        assert torch.equal(cache.keys[0][row, :, : lengths[i]].transpose(0, 1), keys[i])
        assert torch.equal(cache.values[0][row, :, : lengths[i]].transpose(0, 1), values[i])
    assert cache.lengths.tolist() == [lengths[0], *(lengths[i] for i in source.tolist())]
