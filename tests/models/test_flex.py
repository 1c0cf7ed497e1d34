import pytest
import torch
from torch._dynamo.utils import counters

from fixtures.dense_attention import dense_results, errors, random_layer, results
from fixtures.flex_on_cpu import share_prompts_by_flex
from hybridflow.models import SharedPromptPlan
from hybridflow.models.flex import MAX_VARIANTS, _compiled

CPU = torch.device("cpu")
FAMILIES = [
    ((300, 20, 10), (50,)),
    ((100, 20, 30), (10, 1, 1)),
    ((1, 1), (1,), (1, 3, 1)),
    ((129, 1),),
    ((260, 1, 128), (3,), (77, 33)),
]


@pytest.fixture
def on_flex(monkeypatch):
    share_prompts_by_flex(monkeypatch)


@pytest.fixture
def from_scratch(on_flex):
    """Forget what other tests compiled, so that compiled graphs can be counted."""
    torch.compiler.reset()
    _compiled.cache_clear()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.runs
@pytest.mark.parametrize(
    "kv_heads", [2, pytest.param(6, marks=pytest.mark.exhaustive), pytest.param(1, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(
    "families", [FAMILIES[4], *(pytest.param(f, marks=pytest.mark.exhaustive) for f in FAMILIES[:4])]
)
def test_outputs_and_gradients_equal_dense_attention(on_flex, families, kv_heads):
    layer = random_layer(sum(map(sum, families)), 6, kv_heads, 16, torch.float64, value_dim=24)
    plan = SharedPromptPlan(families)
    ours = results(lambda *tensors: plan.attend(0, *tensors, 0.3), layer, CPU)
    assert ours[0].shape == (1, sum(map(sum, families)), 6, 24)
    assert max(errors(ours, dense_results(families, layer, 0.3))) < 1e-13


@pytest.mark.runs
@pytest.mark.parametrize("filling", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_filling_changes_no_other_token(on_flex, filling):
    families = FAMILIES[0]
    layer = random_layer(380 + filling, 6, 2, 16, torch.float64)
    plan = SharedPromptPlan(families).with_filling(filling)
    ours = results(lambda *tensors: plan.attend(0, *tensors, 0.3), layer, CPU)
    assert max(errors(ours, dense_results((*families, (filling,)), layer, 0.3))) < 1e-13
    whole = plan.attend(0, *(x.detach() for x in layer), 0.3)
    alone = SharedPromptPlan(families).attend(0, *(x.detach()[:, :, :380] for x in layer), 0.3)
    torch.testing.assert_close(whole[:, :380], alone, rtol=1e-12, atol=1e-14)


@pytest.mark.exhaustive
def test_all_micro_batches_share_one_compiled_graph(from_scratch):
    for families in (FAMILIES[0], FAMILIES[3], FAMILIES[4], ((1000, 300),), ((500, 1, 1, 1), (200,))):
        layer = random_layer(sum(map(sum, families)), 6, 2, 16, torch.float64)
        plan = SharedPromptPlan(families)
        for index in range(2):
            results(lambda *tensors, plan=plan, index=index: plan.attend(index, *tensors, 0.3), layer, CPU)
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.exhaustive
def test_mask_is_built_once_for_all_layers(on_flex, monkeypatch):
    from hybridflow.models import shared_prompts

    calls, build = [], shared_prompts.block_mask_of
    monkeypatch.setattr(shared_prompts, "block_mask_of", lambda *arguments: calls.append(1) or build(*arguments))
    plan, layer = SharedPromptPlan(FAMILIES[0]), random_layer(380, 6, 2, 16, torch.float64)
    for index in range(3):
        plan.attend(index, *layer, 0.3)
    assert len(calls) == 1
    assert plan == SharedPromptPlan(FAMILIES[0])  # equal by its families, not by what it holds


@pytest.mark.exhaustive
def test_process_may_hold_more_compiled_variants_than_the_default(on_flex):
    SharedPromptPlan(FAMILIES[3]).attend(0, *random_layer(130, 2, 1, 16, torch.float64), 0.3)
    assert torch._dynamo.config.recompile_limit >= MAX_VARIANTS > 8


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
def test_compiled_kernel_for_the_cpu_equals_dense_attention(from_scratch, monkeypatch):
    monkeypatch.setattr("hybridflow.models.flex.BACKEND", "inductor")
    for families in FAMILIES[:2] + FAMILIES[3:]:
        layer = random_layer(sum(map(sum, families)), 6, 2, 16, torch.float32)
        with torch.no_grad():
            out = SharedPromptPlan(families).attend(0, *layer, 0.3)
        assert errors([out], dense_results(families, layer, 0.3)[:1])[0] < 1e-6
    assert counters["stats"]["unique_graphs"] == 1
