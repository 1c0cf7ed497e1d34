import pytest
import torch

from fixtures.dense_attention import dense_results, random_layer, results
from hybridflow.errors import ModelError
from hybridflow.models.attention import PackedPlan, PaddedPlan
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.shared_prompts import SharedPromptPlan

CPU, SCALING = torch.device("cpu"), 0.3
TOLERANCES = {torch.float64: {"rtol": 1e-12, "atol": 1e-14}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


def require_dense(plan, families, layer):
    """Compare output and gradients with dense attention in float64."""
    ours = results(lambda *tensors: plan.attend(0, *tensors, AttentionForm(SCALING)), layer, CPU)
    for found, exact in zip(ours, dense_results(families, layer, SCALING), strict=True):
        torch.testing.assert_close(found.double(), exact, **TOLERANCES[layer[0].dtype])


def test_consecutive_sequences_of_one_length_are_one_run():
    assert PackedPlan.from_lengths([3, 3, 1, 3]).runs == ((2, 3), (1, 1), (1, 3))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[5], [1], [1, 1, 1], [2, 2, 1, 4, 4, 4, 1]])
def test_packed_sequence_attends_only_to_itself(lengths, kv_heads):
    layer = random_layer(sum(lengths), 4, kv_heads, 4, torch.float64, value_dim=7)  # values may be wider
    require_dense(PackedPlan.from_lengths(lengths), [[n] for n in lengths], layer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("short", [512, 4, 1])
def test_branch_attends_to_its_trunk_and_to_itself(monkeypatch, short, kv_heads, dtype):
    monkeypatch.setattr("hybridflow.models.shared_prompts.SHORT", short)
    families = ((3, 1, 2), (2,), (1, 4, 1, 1))
    layer = random_layer(sum(map(sum, families)), 4, kv_heads, 4, dtype)
    require_dense(SharedPromptPlan(families), families, layer)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_padded_row_does_not_attend_to_padding(kv_heads):
    layers = [random_layer(5, 4, kv_heads, 4, torch.float64, seed=seed) for seed in range(3)]
    out = PaddedPlan().attend(0, *(torch.cat(parts) for parts in zip(*layers, strict=True)), AttentionForm(SCALING))
    assert out.isfinite().all()
    for row, length in enumerate([5, 1, 3]):
        own = tuple(x[:, :, :length] for x in layers[row])
        torch.testing.assert_close(out[row, :length], dense_results([[length]], own, SCALING)[0][0])


def test_bfloat16_attention_is_rounded_once():
    query, key, value = random_layer(6, 4, 2, 4, torch.bfloat16)
    out = PackedPlan.from_lengths([6]).attend(0, query, key, value, AttentionForm(SCALING))
    exact = PackedPlan.from_lengths([6]).attend(0, query.float(), key.float(), value.float(), AttentionForm(SCALING))
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
