import pytest
import torch

from hybridflow.models import PackedPlan
from hybridflow.models.kv_cache import DecodePlan, KVCache, PrefillPlan

HEADS, KV_HEADS, DIM, SCALING = 4, 2, 3, 0.4


def random_tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, HEADS, count, DIM), (1, KV_HEADS, count, DIM), (1, KV_HEADS, count, DIM))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def prefilled(lengths: list[int], seed: int) -> tuple[PrefillPlan, tuple[torch.Tensor, ...]]:
    plan, qkv = PrefillPlan(lengths), random_tokens(sum(lengths), seed)
    plan.attend(0, *qkv, SCALING)
    return plan, qkv


def test_prefill_equals_packed_attention_and_stores_keys_by_row():
    plan, (query, key, value) = prefilled([2, 1, 3], seed=0)
    out = plan.attend(0, query, key, value, SCALING)
    assert torch.equal(out, PackedPlan.from_lengths([2, 1, 3]).attend(0, query, key, value, SCALING))
    cache = KVCache(torch.device("cpu"))
    cache.append(plan, torch.tensor([0, 1, 2]), capacity=3)
    assert cache.keys[0].shape == (3, KV_HEADS, 3, DIM)
    assert torch.equal(cache.keys[0][0, :, :2], key[0, :, :2])
    assert torch.equal(cache.values[0][2], value[0, :, 3:])
    assert not cache.keys[0][1, :, 1:].any()


def test_rows_of_group_share_prompt_and_later_rows_keep_earlier_ones():
    cache = KVCache(torch.device("cpu"))
    first, (_, key, value) = prefilled([2, 1], seed=1)
    cache.append(first, torch.tensor([0, 0, 1]), capacity=4)
    later, (_, later_key, _) = prefilled([3], seed=2)
    cache.append(later, torch.tensor([0]), capacity=6)
    assert cache.lengths.tolist() == [2, 2, 1, 3]
    assert cache.keys[0].shape == cache.values[0].shape == (4, KV_HEADS, 6, DIM)
    assert torch.equal(cache.keys[0][0, :, :2], key[0, :, :2])
    assert torch.equal(cache.keys[0][0], cache.keys[0][1])
    assert torch.equal(cache.values[0][2, :, :1], value[0, :, 2:])
    assert torch.equal(cache.keys[0][3, :, :3], later_key[0])
    cache.append(prefilled([1], seed=2)[0], torch.tensor([0]), capacity=3)
    assert cache.keys[0].shape[2] == cache.values[0].shape[2] == cache.capacity == 6  # it does not shrink


def test_keep_moves_rows_to_given_order():
    cache = KVCache(torch.device("cpu"))
    plan, (_, key, _) = prefilled([2, 1, 3], seed=3)
    cache.append(plan, torch.tensor([0, 1, 2]), capacity=4)
    cache.keep([0, 2])
    assert cache.lengths.tolist() == [2, 3]
    assert len(cache.keys[0]) == len(cache.values[0]) == 2
    assert torch.equal(cache.keys[0][0, :, :2], key[0, :, :2])
    assert torch.equal(cache.keys[0][1, :, :3], key[0, :, 3:])
    cache.keep([1, 0])
    assert cache.lengths.tolist() == [3, 2]
    assert torch.equal(cache.keys[0][0, :, :3], key[0, :, 3:])
    assert torch.equal(cache.keys[0][1, :, :2], key[0, :, :2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_decoding_by_token_equals_attention_over_whole_sequence(dtype):
    prompts, new = [2, 1, 4], 3
    whole = [tuple(x.to(dtype) for x in random_tokens(length + new, seed=10 + length)) for length in prompts]
    plan = PrefillPlan(prompts)
    packed = [torch.cat([x[i][:, :, :n] for x, n in zip(whole, prompts, strict=True)], dim=2) for i in range(3)]
    plan.attend(0, *packed, SCALING)
    cache = KVCache(torch.device("cpu"))
    cache.append(plan, torch.arange(3), capacity=7)
    expected = [PackedPlan.from_lengths([x[0].shape[2]]).attend(0, *x, SCALING)[0] for x in whole]
    for step in range(new):
        qkv = [
            torch.cat([x[i][:, :, n + step : n + step + 1] for x, n in zip(whole, prompts, strict=True)])
            for i in range(3)
        ]
        out = DecodePlan(cache, 3).attend(0, *qkv, SCALING)
        assert out.shape == (3, 1, HEADS, DIM)
        for row, length in enumerate(prompts):
            torch.testing.assert_close(out[row, 0], expected[row][length + step])
        cache.lengths += 1


def test_decode_plan_writes_only_its_first_rows():
    cache = KVCache(torch.device("cpu"))
    cache.append(prefilled([2, 1, 3], seed=3)[0], torch.tensor([0, 1, 2]), capacity=4)
    before = cache.keys[0].clone()
    query, key, value = (x.transpose(0, 2) for x in random_tokens(2, seed=4))
    DecodePlan(cache, 2).attend(0, query, key, value, SCALING)
    assert torch.equal(cache.keys[0][2], before[2])
    assert not torch.equal(cache.keys[0][0], before[0])
