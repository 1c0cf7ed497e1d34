"""Idle offload on a CUDA device: memory at each level, pinned copies, and memory that runs out for real."""

import gc
from contextlib import contextmanager

import pytest
import torch

from hybridflow.engines import offload
from hybridflow.errors import ModelError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.filterwarnings("ignore"),  # warnings of torch.compile
]

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 4096}
SLACK = 4 * 2**20
"""Bytes by which measured memory may differ: blocks of the allocator are rounded, and library workspaces remain."""


def loss(outputs, part):
    return -outputs["log_probs"].sum() / 40, {}


@pytest.fixture
def build(build_engine, gpu):
    def build(path, *, idle=True, budget=64):
        offload = "idle" if idle else None
        engine = build_engine(path, dtype="bfloat16", max_tokens=budget, compile="auto", lr=1e-3, offload=offload)
        if idle and gpu.type == "cpu":  # in a rehearsal
            for parameter in engine.model.parameters():
                parameter.data = parameter.data.clone()  # memory of a file cannot be freed
            engine._start_offload()
        return engine

    return build


@pytest.fixture
def path(tiny_model):
    return tiny_model("qwen2", **SIZES)


@pytest.fixture
def allocated(gpu):
    """Return a function that returns the bytes allocated on the device since the test began; 0 on a CPU.

    The workspaces of matrix products are allocated before: one for this thread, and one for that of backward passes.
    """
    factor = torch.ones(64, 64, dtype=torch.bfloat16, device=gpu, requires_grad=True)
    torch.addmm(factor, factor, factor).sum().backward()
    del factor
    gc.collect()
    start = torch.cuda.memory_allocated(gpu) if gpu.type == "cuda" else 0
    return lambda: torch.cuda.memory_allocated(gpu) - start if gpu.type == "cuda" else 0


@contextmanager
def memory_limit(gpu, num_bytes):
    """Limit what this process may allocate on the device."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(gpu)
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, gpu)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)


def test_each_level_has_only_its_memory_on_the_device(build, path, rows, gpu, allocated):
    engine = build(path)
    engine.update(rows, loss)  # the moments of the first step
    engine.forward(rows)
    count = sum(parameter.numel() for parameter in engine.parameters.values())
    idle = allocated()
    with engine.on_device(with_optimizer=False):
        with_weights = allocated()
        with engine.on_device():
            with_optimizer = allocated()
        assert allocated() == with_weights
    assert allocated() == idle
    if gpu.type == "cuda":
        assert idle < SLACK
        assert with_weights - idle == pytest.approx(2 * count, abs=SLACK)
        assert with_optimizer - with_weights == pytest.approx(12 * count, abs=SLACK)


def test_an_offloaded_engine_computes_the_same(build, path, rows, gpu):
    plain, idle = (build(path, idle=idle) for idle in (False, True))
    for _ in range(3):
        expected, found = (engine.forward(rows)["log_probs"] for engine in (plain, idle))
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        expected, found = (engine.update(rows, loss).grad_norm for engine in (plain, idle))
        assert found == pytest.approx(expected, rel=1e-2)


def test_host_copies_are_pinned_and_allocated_once(build, path, rows, gpu, monkeypatch):
    made = []
    allocate = offload.HostMemory

    def counted(sizes, device):
        made.append(sum(sizes))
        return allocate(sizes, device)

    monkeypatch.setattr(offload, "HostMemory", counted)
    engine = build(path)
    engine.update(rows, loss)
    count = sum(parameter.numel() for parameter in engine.parameters.values())
    for _ in range(2):
        engine.update(rows, loss)
        engine.forward(rows)
    assert made == [2 * count, 4 * count, 8 * count]  # weights, masters, moments
    state = engine.state_dict()
    stored = [*state["model"].values(), *(moments["exp_avg"] for moments in state["optimizer"].values())]
    assert {tensor.device.type for tensor in stored} == {"cpu"}
    assert {tensor.is_pinned() for tensor in stored} == {gpu.type == "cuda"}


def test_a_device_too_small_for_the_optimizer_leaves_the_state_intact(build, path, rows, gpu):
    plain, idle = (build(path, idle=idle) for idle in (False, True))
    for engine in (plain, idle):
        engine.update(rows, loss)
    if gpu.type == "cuda":
        held = torch.cuda.memory_allocated(gpu)
        count = sum(parameter.numel() for parameter in idle.parameters.values())
        with (
            memory_limit(gpu, held + 6 * count),  # an update needs 14
            pytest.raises(ModelError, match=r"out of memory in the move of .* GiB from the host: .* has .* GiB free"),
        ):
            idle.update(rows, loss)
        assert torch.cuda.memory_allocated(gpu) - held < SLACK
    assert idle.update(rows, loss).grad_norm == pytest.approx(plain.update(rows, loss).grad_norm, rel=1e-2)


def test_an_update_without_memory_names_settings_and_changes_nothing(build, path, rollout_rows, gpu):
    engine, rows = build(path, idle=False, budget=4096), rollout_rows([30] * 40, [30] * 40)
    before = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
    if gpu.type == "cuda":
        message = r"out of memory in an update, nothing was applied: .* has .* GiB free.*; set a smaller memory\.max_to"
        with memory_limit(gpu, torch.cuda.memory_allocated(gpu) + 2**25), pytest.raises(ModelError, match=message):
            engine.update(rows, loss)
    assert all(torch.equal(before[name], parameter) for name, parameter in engine.parameters.items())
    assert engine.update(rows, loss).grad_norm > 0
