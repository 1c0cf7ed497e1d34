"""The training step on a CUDA device: numbers, dtype, compilation, host reads, FSDP2 in a group of one rank on NCCL."""

import gc
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from hybridflow.checkpoint import describe_state, read_state_into, save_sharded_state, save_state
from hybridflow.config import Config
from hybridflow.engines import token_budget, torch_engine
from hybridflow.engines.process_group import join_alone
from hybridflow.engines.ranks import Ranks
from hybridflow.models.model_sizes import mfu, training_flops
from hybridflow.runtime.device import take_compilations
from hybridflow.runtime.matmul_peak import measure_peak_flops, peak_flops
from hybridflow.workers.losses import actor_loss

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu"), pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096}
LENGTHS = [([3, 1, 5, 2], [4, 6, 1, 3]), ([7, 7, 2], [4, 6, 9]), ([2, 4, 4, 6, 1], [3, 1, 8, 2, 2])]


@pytest.fixture
def build(build_engine):
    return partial(build_engine, dtype="auto", compile="auto", max_tokens=24, lr=1e-4)


def with_columns(rows):
    mask = rows.batch["response_mask"]
    generator = torch.Generator().manual_seed(1)
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages"):
        rows.batch[name] = torch.randn(mask.shape, generator=generator) - 5 * name.endswith("probs")
    return rows


def loss():
    config = Config(actor={"entropy_coef": 0.01, "epochs": 2}, algorithm={"kl_in_loss": True})
    return actor_loss(config, 0.05, num_tokens=40, num_sequences=9)


def plain_loss(outputs, part):
    return -outputs["log_probs"].sum() / 40, {}


def compute_in_a_group_of_one(monkeypatch, gpu):
    """Shard the engines that are built from now on over the one rank of a group."""
    join_alone()
    assert gpu.type == "cpu" or "nccl" in str(dist.get_backend_config())
    monkeypatch.setattr(torch_engine, "Ranks", lambda parallel, device, **_: Ranks(parallel, device, needs_mesh=True))


def set_sync_debug_mode(device, mode):
    """Make operations that wait for the GPU an error, or allow them again."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def test_auto_computes_in_bfloat16_on_a_gpu_and_keeps_float32_weights(build, tiny_model, gpu):
    engine = build(tiny_model("qwen2"))
    assert engine.compute_dtype == (torch.bfloat16 if gpu.type == "cuda" else torch.float32)
    assert {parameter.dtype for parameter in engine.parameters.values()} == {torch.float32}


def test_no_graph_is_compiled_after_the_first_steps(build, tiny_model, rollout_rows, gpu):
    torch._dynamo.reset()
    take_compilations()
    engine, counts = build(tiny_model("qwen3", **SIZES)), []
    for prompt_lens, response_lens in [*LENGTHS, *LENGTHS[::-1]]:
        rows = with_columns(rollout_rows(prompt_lens, response_lens))
        engine.forward(rows, with_entropy=True)
        engine.update(rows, loss(), with_entropy=True)
        counts.append(take_compilations())
    assert counts[len(LENGTHS) :] == [0] * len(LENGTHS), counts
    if gpu.type == "cuda":
        assert sum(counts) > 0


@pytest.mark.parametrize("packing", [True, False])
def test_the_host_does_not_wait_for_the_device_between_micro_batches(build, tiny_model, rollout_rows, gpu, packing):
    engine = build(tiny_model("qwen3", **SIZES), compile=False)
    engine.row_forward.memory = engine.row_forward.memory.model_copy(update={"packing": packing})
    rows = with_columns(rollout_rows(*LENGTHS[0]))
    expected = engine.update(rows, loss(), with_entropy=True).metrics.keys()  # warms up
    set_sync_debug_mode(gpu, "error")
    try:
        engine.add_to_update(rows, loss(), number=0, is_last=True, with_entropy=True, temperature=0.7)
    finally:
        set_sync_debug_mode(gpu, "default")
    shares = engine.learner._started.shares
    assert len(shares) > 1
    assert all(share.metrics.keys() == expected for share in shares)
    assert {share.loss.device.type for share in shares} == {gpu.type}
    engine.learner.optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("compile", [False, "auto"])
@pytest.mark.parametrize("is_once_per_update", [True, False])
def test_fsdp_in_a_group_of_one_trains_as_one_process(
    build, tiny_model, rollout_rows, monkeypatch, gpu, compile, is_once_per_update
):
    path, rows = tiny_model("qwen3", **SIZES), with_columns(rollout_rows(*LENGTHS[0]))
    alone = build(path, dtype="float32", compile=False)
    expected = [alone.update(rows, loss(), with_entropy=True) for _ in range(3)]
    compute_in_a_group_of_one(monkeypatch, gpu)
    sharded = build(path, dtype="float32", compile=compile)
    assert sharded.is_sharded
    assert sharded.learner.reduction.is_once_per_update == (gpu.type == "cuda")  # a small model
    sharded.learner.reduction.is_once_per_update = is_once_per_update
    results = [sharded.update(rows, loss(), with_entropy=True) for _ in range(3)]
    assert [r.loss for r in results] == pytest.approx([r.loss for r in expected], rel=1e-3)
    assert [r.grad_norm for r in results] == pytest.approx([r.grad_norm for r in expected], rel=1e-3)


def tensors_of(engine):
    """Return the training state as a table of local tensors, by name."""
    state = engine.state_dict()
    found = dict(state["model"])
    for name, moments in state["optimizer"].items():
        found |= {f"{key} of {name}": moment for key, moment in moments.items()}
    return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in found.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("was_sharded", [True, False])
def test_fsdp_in_a_group_of_one_resumes_from_a_checkpoint(
    build, tiny_model, rollout_rows, monkeypatch, gpu, tmp_path, was_sharded, dtype
):
    path, rows = tiny_model("qwen3", **SIZES), with_columns(rollout_rows(*LENGTHS[0]))
    if was_sharded:
        compute_in_a_group_of_one(monkeypatch, gpu)
    uninterrupted = build(path, dtype=dtype, compile=False)
    assert uninterrupted.is_sharded == was_sharded
    for _ in range(2):
        uninterrupted.update(rows, loss(), with_entropy=True)
    (save_sharded_state if was_sharded else save_state)(uninterrupted.state_dict(), tmp_path / "actor")
    compute_in_a_group_of_one(monkeypatch, gpu)
    resumed = build(path, dtype=dtype, compile=False)
    resumed.load_shards(describe_state(tmp_path / "actor"), lambda state: read_state_into(state, tmp_path / "actor"))
    assert resumed.is_sharded
    assert resumed.num_updates == 2
    found, expected = tensors_of(resumed), tensors_of(uninterrupted)
    assert found.keys() == expected.keys()
    assert {tensor.device.type for tensor in found.values()} == {gpu.type}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ours, theirs = (engine.update(rows, loss(), with_entropy=True) for engine in (resumed, uninterrupted))
    tolerance = 1e-5 if was_sharded else 1e-3 if dtype == "float32" else 0.02
    assert (ours.loss, ours.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=tolerance)


def test_the_matrix_product_peak_of_the_compute_dtype_is_measured(gpu):
    size = 4096 if gpu.type == "cuda" else 256
    fast, slow = (measure_peak_flops(dtype, size, 2, device=gpu) for dtype in (torch.bfloat16, torch.float32))
    assert min(fast, slow) > 0
    if gpu.type == "cuda":
        assert fast > 2 * slow  # float32 products are not computed in TF32


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log_probs_and_updates_equal_those_on_cpu(build, tiny_model, rows, dtype, monkeypatch):
    on_device = build(tiny_model("qwen2"), dtype=dtype)
    monkeypatch.setattr("hybridflow.engines.torch_engine.own_device", lambda: torch.device("cpu"))
    on_host = build(tiny_model("qwen2"), dtype=dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-6, "atol": 1e-7}
    for _ in range(3):
        ours, theirs = (engine.forward(rows)["log_probs"] for engine in (on_device, on_host))
        torch.testing.assert_close(ours, theirs, **tolerance)
        norms = [engine.update(rows, plain_loss).grad_norm for engine in (on_device, on_host)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_offloaded_weights_free_device_memory_and_change_no_result(build, tiny_model, rows, gpu):
    path = tiny_model("qwen2", **SIZES)
    plain = build(path, dtype="bfloat16")
    expected = [plain.update(rows, plain_loss).grad_norm for _ in range(2)]
    del plain
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if gpu.type == "cuda" else 0
    engine = build(path, dtype="bfloat16", offload="host")
    weights = sum(parameter.numel() * parameter.element_size() for parameter in engine.parameters.values())
    assert [engine.update(rows, plain_loss).grad_norm for _ in range(2)] == pytest.approx(expected, rel=1e-2)
    torch.cuda.empty_cache()
    if gpu.type == "cuda":
        assert torch.cuda.memory_allocated() - before < 0.2 * weights


def test_token_budget_is_found_from_device_memory(build, tiny_model):
    engine = build(tiny_model("qwen2", max_position_embeddings=1024, **SIZES), dtype="bfloat16")
    assert engine.find_token_budget(100, 400, 1) >= 4096


def test_mfu_of_an_update_is_a_share_of_the_peak_of_the_device(build, tiny_model, gpu):
    sizes = SIZES | {"max_position_embeddings": 1024}
    tokens = 16384 if gpu.type == "cuda" else 512
    engine = build(tiny_model("qwen2", **sizes), dtype="bfloat16", max_tokens=tokens)
    rows = token_budget._rows(tokens // 256, 8, 248)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        engine.update(rows, plain_loss)  # returns the gradient's norm, so that the device has finished
        seconds.append(time.perf_counter() - start)
    peak = peak_flops(torch.bfloat16)
    share = mfu(training_flops(engine.row_forward.shape, [256] * len(rows)), min(seconds), peak)
    assert 0 < share < 1
    if gpu.type == "cuda":
        assert peak > 1e13  # a CPU computes less than that
