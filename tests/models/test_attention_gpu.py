"""Attention of packed rows on a CUDA device equals dense attention in float64, forward and backward.

In half precision the inputs of the reference are the rounded ones, so that the error is that of the computation.
"""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from fixtures.dense_attention import dense_results, errors, random_layer, results
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.errors import ModelConfigError
from hybridflow.models.attention import PackedPlan
from hybridflow.models.attention_backend import AttentionCase, attention_for
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.shared_prompts import SharedPromptPlan
from hybridflow.models.varlen import KERNEL_VARIABLE, KERNELS, packed_kernel
from hybridflow.runtime.threads import set_deterministic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.filterwarnings("ignore"),  # warnings of torch.compile
]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HEADS = [(4, 4), (6, 2), (14, 2), (4, 1)]
LENGTHS = [130, 1, 64, 300, 1, 17, 128]
FAMILIES = [((300, 20, 10), (50,)), ((1, 1), (1,), (1, 3, 1)), ((129, 1),), ((260, 1, 128), (3,), (77, 33))]
LIMIT = {BF16: 1e-2, FP16: 2e-3, FP32: 1e-5, FP64: 1e-12}
"""Largest relative error; the rounding of bfloat16 is 4e-3, of float16 5e-4."""


PLANS = pytest.mark.parametrize(
    ("plan", "tokens"),
    [(PackedPlan.from_lengths(LENGTHS), sum(LENGTHS)), (SharedPromptPlan(FAMILIES[0]), sum(map(sum, FAMILIES[0])))],
)


def require_dense(gpu, plan, families, layer, *, expected="", limit=None):
    """Compare output and gradients with dense attention: each relative to its norm, or to the largest norm."""
    case = AttentionCase.of(*(x.to(gpu) for x in layer))
    if expected and gpu.type == "cuda":
        assert attention_for(case, shares_prompts=isinstance(plan, SharedPromptPlan)) == expected
    scaling = layer[0].shape[-1] ** -0.5
    ours = results(lambda *tensors: plan.attend(0, *tensors, AttentionForm(scaling)), layer, gpu)
    reference = dense_results(families, layer, scaling)
    if limit is not None:
        assert max(errors(ours, reference)) < limit
        return
    assert errors(ours[:1], reference[:1])[0] < LIMIT[BF16]
    differences = [(x.double() - y).norm() for x, y in zip(ours, reference, strict=True)]
    assert max(differences) < LIMIT[BF16] * max(y.norm() for y in reference)  # gradients may be zero


@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_varlen_equals_dense_attention(gpu, dtype, heads, kv_heads, dim):
    layer = random_layer(sum(LENGTHS), heads, kv_heads, dim, dtype)
    plan, families = PackedPlan.from_lengths(LENGTHS), [[n] for n in LENGTHS]
    require_dense(gpu, plan, families, layer, expected="varlen", limit=LIMIT[dtype])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (14, 2, 64), (4, 1, 128)])
def test_other_kernels_of_packed_rows_equal_dense_attention(gpu, monkeypatch, name, heads, kv_heads, dim):
    monkeypatch.setenv(KERNEL_VARIABLE, name)
    packed_kernel.cache_clear()
    try:
        if gpu.type == "cuda":
            packed_kernel()
        layer = random_layer(sum(LENGTHS), heads, kv_heads, dim, BF16)
        plan, families = PackedPlan.from_lengths(LENGTHS), [[n] for n in LENGTHS]
        require_dense(gpu, plan, families, layer, expected="varlen", limit=LIMIT[BF16])
    except ModelConfigError as error:
        pytest.skip(str(error))
    finally:
        monkeypatch.undo()
        packed_kernel.cache_clear()
        if current_flash_attention_impl():
            restore_flash_attention_impl()


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [2000]])
def test_varlen_computes_single_tokens_and_single_sequences(gpu, lengths):
    layer = random_layer(sum(lengths), 6, 2, 64, BF16)
    layer = tuple(torch.cat([x.detach(), x.detach()[:, :, :1].expand(-1, -1, 3, -1)], dim=2) for x in layer)
    require_dense(gpu, PackedPlan.from_lengths(lengths).with_filling(3), [[n] for n in [*lengths, 3]], layer)


@pytest.mark.parametrize("families", FAMILIES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (14, 2, 64), (4, 4, 80), (4, 1, 128)])
def test_shared_prompts_equal_dense_attention(gpu, families, heads, kv_heads, dim):
    layer = random_layer(sum(map(sum, families)), heads, kv_heads, dim, BF16)
    require_dense(gpu, SharedPromptPlan(families), families, layer, expected="flex")


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("families", [FAMILIES[0], *([[n] for n in x] for x in (LENGTHS, [64, 64], [1, 1, 1, 500]))])
def test_float32_and_float64_equal_dense_attention(gpu, families, dtype):
    is_shared = families is FAMILIES[0]
    plan = SharedPromptPlan(families) if is_shared else PackedPlan.from_lengths([n for (n,) in families])
    layer = random_layer(sum(map(sum, families)), 6, 2, 64, dtype)
    require_dense(gpu, plan, families, layer, expected="sdpa", limit=LIMIT[dtype])


def test_micro_batches_of_any_size_share_one_compiled_kernel(gpu):
    torch.compiler.reset()
    counters.clear()
    for trunk, *branches in ((300, 20, 10), (1000, 300, 1), (131, 1), (500, 17, 16, 400)):
        layer = random_layer(trunk + sum(branches), 6, 2, 64, BF16)
        plan = SharedPromptPlan(((trunk, *branches),))
        for _ in range(2):
            results(lambda *tensors, plan=plan: plan.attend(0, *tensors, AttentionForm(0.125)), layer, gpu)
    if gpu.type == "cuda":
        assert counters["stats"]["unique_graphs"] == 1


@PLANS
def test_layers_do_not_wait_for_the_device(gpu, plan, tokens):
    layer = [x.detach().to(gpu).requires_grad_() for x in random_layer(tokens, 6, 2, 64, BF16)]
    plan.attend(0, *layer, AttentionForm(0.125)).sum().backward()  # compiles
    fresh = replace(plan)  # without layout and mask
    is_watched = gpu.type == "cuda"
    try:
        if is_watched:
            torch.cuda.set_sync_debug_mode("error")
        for index in range(2):
            fresh.attend(index, *layer, AttentionForm(0.125)).sum().backward()
    finally:
        if is_watched:
            torch.cuda.set_sync_debug_mode("default")


@PLANS
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_results_are_bit_identical_in_deterministic_mode(gpu, plan, tokens, dtype):
    layer = random_layer(tokens, 6, 2, 64, dtype)
    set_deterministic(True)
    try:
        runs = [results(lambda *tensors: plan.attend(0, *tensors, AttentionForm(0.125)), layer, gpu) for _ in range(3)]
    finally:
        set_deterministic(False)
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


def test_shared_prompts_need_no_memory_for_all_pairs_of_tokens(gpu):
    families = ((2048, *[1024] * 14),)  # 16,384 tokens: a mask of all pairs has 268 MB
    if gpu.type == "cpu":
        families = ((256, *[128] * 2),)
    tokens = sum(map(sum, families))
    layer = [x.detach().to(gpu).requires_grad_() for x in random_layer(tokens, 4, 2, 64, BF16)]
    plan = SharedPromptPlan(families)
    plan.attend(0, *layer, AttentionForm(0.125)).sum().backward()  # compiles, and times kernels in memory of its own
    for tensor in layer:
        tensor.grad = None
    if gpu.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    plan.attend(0, *layer, AttentionForm(0.125)).sum().backward()
    if gpu.type == "cuda":
        assert torch.cuda.max_memory_allocated() - before < 0.5 * tokens**2


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-2), ("float32", 1e-4)])
def test_packed_rows_and_shared_prompts_train_as_padded_rows(gpu, tiny_model, rollout_rows, dtype, limit):
    """Compare log-probs before and after an update, and its gradient norm. Four rows each share 40 prompt tokens."""
    path = tiny_model("qwen2", hidden_size=256, num_attention_heads=4, max_position_embeddings=256)
    rows = rollout_rows([40] * 8, [30, 7, 1, 60, 16, 16, 40, 3])
    for row in range(8):
        for name in ("input_ids", "prompts"):
            rows.batch[name][row, :40] = rows.batch[name][row // 4 * 4, :40]

    def loss(outputs, part):
        return -outputs["log_probs"].sum() / 173, {}

    runs = []
    for memory in ({"packing": False}, {"share_prompts": False}, {"share_prompts": True}):
        engine = TorchEngine(
            str(path),
            "policy",
            model=ModelConfig(path=str(path), dtype=dtype),
            memory=MemoryConfig(max_tokens_per_micro_batch=2000, **memory),
            optimizer=OptimizerConfig(lr=1e-4),
        )
        before = engine.forward(rows)["log_probs"]
        update = engine.update(rows, loss)
        runs.append(([before, engine.forward(rows)["log_probs"]], update.grad_norm, update.num_computed_tokens))
    sharing = 493 - 2 * 3 * 39
    assert [tokens for _, _, tokens in runs[1:]] == [493, sharing if gpu.type == "cpu" or dtype == "bfloat16" else 493]
    for log_probs, norm, _ in runs[1:]:
        assert max(errors(log_probs, [x.double() for x in runs[0][0]])) < limit
        assert norm == pytest.approx(runs[0][1], rel=limit)
