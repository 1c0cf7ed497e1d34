import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from fixtures.dense_attention import dense_results, errors, random_layer, results, seen_keys
from fixtures.flex_on_cpu import share_prompts_by_flex
from fixtures.peak_memory import peak_bytes
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.block_mask import MAX_VARIANTS, _compiled, block_mask_of
from hybridflow.models.shared_prompts import SharedPromptPlan

CPU = torch.device("cpu")
FIXED = [
    ((1,),),
    ((128,),),
    ((129,),),
    ((300, 20, 10), (50,)),
    ((1, 1, 1, 1), (1,)),
    ((128, 128, 128), (256, 1)),
    ((5, 700), (5, 3, 700)),
]

FORM = AttentionForm(0.3)


LENGTHS = st.sampled_from([1, 3, 40, 127, 128, 129]) | st.integers(1, 300)
FAMILIES = st.lists(st.lists(LENGTHS, min_size=1, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple)


def every_example(test):
    """Run a test on random families and on fixed ones."""
    for families in FIXED:
        test = example(families)(test)
    return settings(deadline=None, derandomize=True, max_examples=40)(given(FAMILIES)(test))


def blocks(counts: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    assert counts.dtype == indices.dtype == torch.int32
    return [row[:count] for count, row in zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)]


@every_example
def test_blocks_equal_those_that_pytorch_finds_from_all_pairs(families):
    mask = block_mask_of(families, CPU)
    tokens = sum(map(sum, families))
    expected = create_block_mask(mask.mask_mod, None, None, tokens, tokens, device="cpu")
    assert mask.seq_lengths == expected.seq_lengths == (tokens, tokens)
    assert mask.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        ours, theirs = (
            blocks(getattr(x, f"{name}_num_blocks"), getattr(x, f"{name}_indices")) for x in (mask, expected)
        )
        assert ours == theirs, name


@every_example
def test_token_attends_to_its_trunk_and_its_sequence_up_to_itself(families):
    mask = block_mask_of(families, CPU)
    index = torch.arange(sum(map(sum, families)))
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, index[:, None], index[None]), seen_keys(families))


def test_tensors_of_the_mask_are_aligned():
    mask = block_mask_of(((300, 21),), CPU)
    bounds = [cell.cell_contents for cell in mask.mask_mod.__closure__ or ()]
    assert [x.dtype for x in bounds] == [torch.int32] * 3
    tables = [getattr(mask, f"{name}_{what}") for name in ("kv", "full_q") for what in ("num_blocks", "indices")]
    assert {x.data_ptr() % 16 for x in [*bounds, *tables]} == {0}


def test_mask_of_64_thousand_tokens_holds_no_tensor_of_all_pairs():
    families = ((2000, *[1000] * 6),) * 8
    assert block_mask_of(families, CPU).seq_lengths == (64_000, 64_000)
    assert 64_000 < peak_bytes(lambda: block_mask_of(families, CPU)) < 8 * 64_000 * 64_000 / 1000  # bytes


PACKED = [
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
@pytest.mark.parametrize("families", [PACKED[4], *(pytest.param(f, marks=pytest.mark.exhaustive) for f in PACKED[:4])])
def test_outputs_and_gradients_equal_dense_attention(on_flex, families, kv_heads):
    layer = random_layer(sum(map(sum, families)), 6, kv_heads, 16, torch.float64, value_dim=24)
    plan = SharedPromptPlan(families)
    ours = results(lambda *tensors: plan.attend(0, *tensors, FORM), layer, CPU)
    assert ours[0].shape == (1, sum(map(sum, families)), 6, 24)
    assert max(errors(ours, dense_results(families, layer, 0.3))) < 1e-13


@pytest.mark.runs
@pytest.mark.parametrize("filling", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_filling_changes_no_other_token(on_flex, filling):
    families = PACKED[0]
    layer = random_layer(380 + filling, 6, 2, 16, torch.float64)
    plan = SharedPromptPlan(families).with_filling(filling)
    ours = results(lambda *tensors: plan.attend(0, *tensors, FORM), layer, CPU)
    assert max(errors(ours, dense_results((*families, (filling,)), layer, 0.3))) < 1e-13
    whole = plan.attend(0, *(x.detach() for x in layer), FORM)
    alone = SharedPromptPlan(families).attend(0, *(x.detach()[:, :, :380] for x in layer), FORM)
    torch.testing.assert_close(whole[:, :380], alone, rtol=1e-12, atol=1e-14)


@pytest.mark.exhaustive
def test_all_micro_batches_share_one_compiled_graph(from_scratch):
    for families in (PACKED[0], PACKED[3], PACKED[4], ((1000, 300),), ((500, 1, 1, 1), (200,))):
        layer = random_layer(sum(map(sum, families)), 6, 2, 16, torch.float64)
        plan = SharedPromptPlan(families)
        for index in range(2):
            results(lambda *tensors, plan=plan, index=index: plan.attend(index, *tensors, FORM), layer, CPU)
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.exhaustive
def test_mask_is_built_once_for_all_layers(on_flex, monkeypatch):
    from hybridflow.models import shared_prompts

    calls, build = [], shared_prompts.block_mask_of
    monkeypatch.setattr(shared_prompts, "block_mask_of", lambda *arguments: calls.append(1) or build(*arguments))
    plan, layer = SharedPromptPlan(PACKED[0]), random_layer(380, 6, 2, 16, torch.float64)
    for index in range(3):
        plan.attend(index, *layer, FORM)
    assert len(calls) == 1
    assert plan == SharedPromptPlan(PACKED[0])  # equal by its families, not by what it holds


@pytest.mark.exhaustive
def test_process_may_hold_more_compiled_variants_than_the_default(on_flex):
    SharedPromptPlan(PACKED[3]).attend(0, *random_layer(130, 2, 1, 16, torch.float64), FORM)
    assert torch._dynamo.config.recompile_limit >= MAX_VARIANTS > 8


@pytest.mark.exhaustive
@pytest.mark.own_run("python: torch.compile starts a compiler")
@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
def test_compiled_kernel_for_the_cpu_equals_dense_attention(from_scratch, monkeypatch):
    monkeypatch.setattr("hybridflow.models.block_mask.BACKEND", "inductor")
    for families in PACKED[:2] + PACKED[3:]:
        layer = random_layer(sum(map(sum, families)), 6, 2, 16, torch.float32)
        with torch.no_grad():
            out = SharedPromptPlan(families).attend(0, *layer, FORM)
        assert errors([out], dense_results(families, layer, 0.3)[:1])[0] < 1e-6
    assert counters["stats"]["unique_graphs"] == 1
