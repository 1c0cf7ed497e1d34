import pytest
import torch

from fixtures.dense_attention import dense_results, errors, random_layer, results
from fixtures.flex_on_cpu import share_prompts_by_flex
from hybridflow.models import SharedPromptPlan

CPU = torch.device("cpu")
FAMILIES = ((300, 20, 10), (50,))


@pytest.fixture
def on_flex(monkeypatch):
    share_prompts_by_flex(monkeypatch)


@pytest.mark.runs
def test_outputs_and_gradients_equal_dense_attention(on_flex):
    families = ((260, 1, 128), (3,), (77, 33))
    layer = random_layer(502, 6, 2, 16, torch.float64, value_dim=24)
    plan = SharedPromptPlan(families)
    ours = results(lambda *tensors: plan.attend(0, *tensors, 0.3), layer, CPU)
    assert ours[0].shape == (1, 502, 6, 24)
    assert max(errors(ours, dense_results(families, layer, 0.3))) < 1e-13


@pytest.mark.runs
def test_filling_changes_no_other_token(on_flex):
    layer = random_layer(385, 6, 2, 16, torch.float64)
    plan = SharedPromptPlan(FAMILIES).with_filling(5)
    ours = results(lambda *tensors: plan.attend(0, *tensors, 0.3), layer, CPU)
    assert max(errors(ours, dense_results((*FAMILIES, (5,)), layer, 0.3))) < 1e-13
    whole = plan.attend(0, *(x.detach() for x in layer), 0.3)
    alone = SharedPromptPlan(FAMILIES).attend(0, *(x.detach()[:, :, :380] for x in layer), 0.3)
    torch.testing.assert_close(whole[:, :380], alone, rtol=1e-12, atol=1e-14)


@pytest.mark.exhaustive
def test_mask_is_built_once_for_all_layers(on_flex, monkeypatch):
    from hybridflow.models import shared_prompts

    calls, build = [], shared_prompts.block_mask_of
    monkeypatch.setattr(shared_prompts, "block_mask_of", lambda *arguments: calls.append(1) or build(*arguments))
    plan, layer = SharedPromptPlan(FAMILIES), random_layer(380, 6, 2, 16, torch.float64)
    for index in range(3):
        plan.attend(index, *layer, 0.3)
    assert len(calls) == 1
    assert plan == SharedPromptPlan(FAMILIES)  # equal by its families, not by what it holds
