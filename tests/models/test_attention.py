import math

import pytest
import torch
from torch import Tensor

from hybridflow.errors import ModelError
from hybridflow.models import PackedPlan, PaddedPlan, SharedPromptPlan, load_causal_lm

SCALING = 0.3


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention of one sequence, one value at a time; (heads, tokens, dim) -> (tokens, heads, dim)."""
    heads, tokens, dim = query.shape
    out = torch.zeros(tokens, heads, value.shape[2], dtype=query.dtype)
    for head in range(heads):
        kv_head = head // (heads // len(key))
        for t in range(tokens):
            scores = [
                SCALING * sum(float(query[head, t, d] * key[kv_head, s, d]) for d in range(dim)) for s in range(t + 1)
            ]
            total = sum(math.exp(score) for score in scores)
            for s in range(t + 1):
                out[t, head] += math.exp(scores[s]) / total * value[kv_head, s]
    return out


def random_layer(tokens: int, kv_heads: int, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return tuple(
        torch.randn(1, heads, tokens, 4, generator=generator, dtype=dtype) for heads in (4, kv_heads, kv_heads)
    )


def test_consecutive_sequences_of_one_length_are_one_run():
    assert PackedPlan.from_lengths([3, 3, 1, 3]).runs == ((2, 3), (1, 1), (1, 3))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[5], [1], [1, 1, 1], [2, 2, 1, 4, 4, 4, 1]])
def test_packed_sequence_attends_only_to_itself(lengths, kv_heads):
    query, key, value = random_layer(sum(lengths), kv_heads)
    out = PackedPlan.from_lengths(lengths).attend(0, query, key, value, SCALING)
    assert out.shape == (1, sum(lengths), 4, 4)
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        expected = by_hand(query[0, :, own], key[0, :, own], value[0, :, own])
        torch.testing.assert_close(out[0, own], expected, rtol=1e-12, atol=1e-14)
        start += length


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("short", [512, 4, 1])
def test_branch_attends_to_its_trunk_and_to_itself(monkeypatch, short, kv_heads, dtype):
    monkeypatch.setattr("hybridflow.models.shared_prompts.SHORT", short)
    families = ((3, 1, 2), (2,), (1, 4, 1, 1))
    query, key, value = random_layer(sum(map(sum, families)), kv_heads, dtype)
    out = SharedPromptPlan(families).attend(0, query, key, value, SCALING)
    tolerance = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    start = 0
    for trunk, *branches in families:
        begin = start + trunk
        for branch in branches or [0]:
            own = [*range(start, start + trunk), *range(begin, begin + branch)]
            expected = by_hand(*(x[0, :, own].double() for x in (query, key, value)))
            torch.testing.assert_close(out[0, own].double(), expected, **tolerance)
            begin += branch
        start = begin


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_padded_row_does_not_attend_to_padding(kv_heads):
    lengths = [5, 1, 3]
    parts = [random_layer(5, kv_heads), random_layer(6, kv_heads), random_layer(7, kv_heads)]
    query, key, value = (torch.cat([part[i][:, :, :5] for part in parts]) for i in range(3))
    out = PaddedPlan().attend(0, query, key, value, SCALING)
    assert out.isfinite().all()
    for row, length in enumerate(lengths):
        expected = by_hand(query[row, :, :length], key[row, :, :length], value[row, :, :length])
        torch.testing.assert_close(out[row, :length], expected, rtol=1e-12, atol=1e-14)


def test_values_may_be_wider_than_keys():
    query, key, _ = random_layer(4, 2)
    value = torch.randn(1, 2, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    out = PackedPlan.from_lengths([4]).attend(0, query, key, value, SCALING)
    torch.testing.assert_close(out[0], by_hand(query[0], key[0], value[0]), rtol=1e-12, atol=1e-14)


def test_bfloat16_attention_is_rounded_once():
    query, key, value = random_layer(6, 2, torch.bfloat16)
    out = PackedPlan.from_lengths([6]).attend(0, query, key, value, SCALING)
    exact = PackedPlan.from_lengths([6]).attend(0, query.float(), key.float(), value.float(), SCALING)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())


def test_model_called_without_plan_is_an_error(tiny_model):
    model = load_causal_lm(tiny_model())
    with pytest.raises(ModelError, match="without attention_plan"):
        model(torch.tensor([[3, 4]]))


def test_mask_in_addition_to_plan_is_an_error(tiny_model):
    model = load_causal_lm(tiny_model())
    mask = torch.zeros(1, 1, 2, 2)
    with pytest.raises(ModelError, match="LlamaAttention uses attention_mask, which is not supported"):
        model(torch.tensor([[3, 4]]), attention_mask=mask, attention_plan=PackedPlan.from_lengths([2]))
