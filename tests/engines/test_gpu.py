"""The engine on a CUDA device: results equal those on the CPU, and offloaded memory is not on the device."""

import gc
import time

import pytest
import torch

from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine, token_budget
from hybridflow.models import mfu, training_flops
from hybridflow.runtime import peak_flops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.filterwarnings("ignore"),  # warnings of torch.compile
]

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 4096}


def loss(outputs, part):
    return -outputs["log_probs"].sum() / 40, {}


def build(path, dtype="float32", *, max_tokens=64, **options):
    return TorchEngine(
        str(path),
        "policy",
        model=ModelConfig(path=str(path), dtype=dtype),
        memory=MemoryConfig(max_tokens_per_micro_batch=max_tokens),
        optimizer=OptimizerConfig(lr=1e-3),
        **options,
    )


@pytest.fixture
def rows(rollout_rows):
    return rollout_rows([3, 1, 5, 2], [4, 6, 1, 3])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log_probs_and_updates_equal_those_on_cpu(tiny_model, rows, dtype, monkeypatch):
    on_device = build(tiny_model("qwen2"), dtype)
    monkeypatch.setattr("hybridflow.engines.torch_engine.own_device", lambda: torch.device("cpu"))
    on_host = build(tiny_model("qwen2"), dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-6, "atol": 1e-7}
    for _ in range(3):
        ours, theirs = (engine.forward(rows)["log_probs"] for engine in (on_device, on_host))
        torch.testing.assert_close(ours, theirs, **tolerance)
        norms = [engine.update(rows, loss).grad_norm for engine in (on_device, on_host)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_offloaded_weights_free_device_memory_and_change_no_result(tiny_model, rows, gpu):
    path = tiny_model("qwen2", **SIZES)
    plain = build(path, "bfloat16")
    expected = [plain.update(rows, loss).grad_norm for _ in range(2)]
    del plain
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if gpu.type == "cuda" else 0
    engine = build(path, "bfloat16", offload="host")
    weights = sum(parameter.numel() * parameter.element_size() for parameter in engine.parameters.values())
    assert [engine.update(rows, loss).grad_norm for _ in range(2)] == pytest.approx(expected, rel=1e-2)
    torch.cuda.empty_cache()
    if gpu.type == "cuda":
        assert torch.cuda.memory_allocated() - before < 0.2 * weights


def test_token_budget_is_found_from_device_memory(tiny_model):
    engine = build(tiny_model("qwen2", max_position_embeddings=1024, **SIZES), "bfloat16")
    assert engine.find_token_budget(100, 400, 1) >= 4096


def test_mfu_of_an_update_is_a_share_of_the_peak_of_the_device(tiny_model, gpu):
    sizes = SIZES | {"max_position_embeddings": 1024}
    tokens = 16384 if gpu.type == "cuda" else 512
    engine = build(tiny_model("qwen2", **sizes), "bfloat16", max_tokens=tokens)
    rows = token_budget._rows(tokens // 256, 8, 248)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        engine.update(rows, loss)  # returns the gradient's norm, so that the device has finished
        seconds.append(time.perf_counter() - start)
    peak = peak_flops(torch.bfloat16)
    share = mfu(training_flops(engine.shape, [256] * len(rows)), min(seconds), peak)
    assert 0 < share < 1
    if gpu.type == "cuda":
        assert peak > 1e13  # a CPU computes less than that
