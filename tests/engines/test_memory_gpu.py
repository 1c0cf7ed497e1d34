"""Memory on a CUDA device: the token budget that is found fits, and the memory formula is within 15% of peaks."""

from dataclasses import asdict

import pytest
import torch

from fixtures.peak_memory import peak_bytes, resident_bytes
from hybridflow.engines import token_budget
from hybridflow.models import forward
from hybridflow.models.forward import max_logits_on
from hybridflow.models.memory import MemoryLayout, forward_memory, training_memory
from hybridflow.models.model_sizes import model_sizes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu"), pytest.mark.filterwarnings("ignore")]  # torch.compile's

PROMPT_LEN = 8


@pytest.fixture
def path(tiny_model, gpu):
    """Return a model of 150M parameters, or of 3M in a rehearsal."""
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 32000}
    small = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    return tiny_model("qwen2", **(large if gpu.type == "cuda" else small), **heads, max_position_embeddings=2048)


def rows_of(tokens, length):
    return token_budget._rows(tokens // length, PROMPT_LEN, length - PROMPT_LEN)


def loss(outputs, part):
    return -outputs["log_probs"].mean(), {}


def peak_of(engine, call):
    """Return the peak of a call, with what the engine holds."""
    if engine.device.type == "cpu":
        return resident_bytes(engine) + peak_bytes(call)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return resident_bytes(engine) + torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_memory_formula_is_within_15_percent_of_an_update(build_engine, path, gpu, compiled, recomputes):
    on_cuda, length = gpu.type == "cuda", 256
    dtype, tokens = ("bfloat16", 8192) if on_cuda else ("float32", 512)
    engine = build_engine(path, max_tokens=tokens, dtype=dtype, compile=compiled, gradient_checkpointing=recomputes)
    rows = rows_of(2 * tokens, length)

    def update():
        engine.update(rows, loss, with_entropy=True)

    update()  # the moments exist from the second update on
    kernels = "compiled" if compiled else "eager" if on_cuda else "cpu"
    layout = MemoryLayout(
        dtype=dtype, gradient_checkpointing=recomputes, kernels=kernels, max_logits=max_logits_on(gpu)
    )
    estimate = training_memory(model_sizes(path), layout, tokens, tokens // length * (length - PROMPT_LEN))
    assert estimate.total == pytest.approx(peak_of(engine, update), rel=0.15), asdict(estimate)


def test_kept_logits_of_several_parts_are_in_the_formula_and_change_no_loss(build_engine, path, gpu, monkeypatch):
    length, tokens, sizes = 256, 8192 if gpu.type == "cuda" else 512, model_sizes(path)
    few = tokens * sizes.shape.vocab_size // 8
    monkeypatch.setattr(forward, "MAX_LOGITS", few)
    monkeypatch.setattr(forward, "PARTS_KEPT", 8)
    rows, losses = rows_of(2 * tokens, length), []
    for max_logits in (few, 8 * few):
        engine = build_engine(path, max_tokens=tokens, dtype="bfloat16", compile="auto")
        engine.model_forward.max_logits = max_logits
        losses.append([engine.update(rows, loss, with_entropy=True).loss for _ in range(2)])
        peak = peak_of(engine, lambda engine=engine: engine.update(rows, loss, with_entropy=True))
        kernels = "compiled" if gpu.type == "cuda" else "cpu"
        layout = MemoryLayout(kernels=kernels, longest=length, max_logits=max_logits)
        estimate = training_memory(sizes, layout, tokens, tokens // length * (length - PROMPT_LEN))
        assert estimate.total == pytest.approx(peak, rel=0.15), asdict(estimate)
        del engine
    assert losses[0][0] == losses[1][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # the backward pass of attention sums in any order


def test_memory_formula_is_within_15_percent_of_log_probs(build_engine, path, gpu):
    on_cuda, length = gpu.type == "cuda", 256
    dtype, tokens = ("bfloat16", 8192) if on_cuda else ("float32", 512)
    engine = build_engine(path, max_tokens=tokens, learns=False, dtype=dtype, compile=False)
    rows = rows_of(2 * tokens, length)
    layout = MemoryLayout(dtype=dtype, kernels="eager" if on_cuda else "cpu", max_logits=max_logits_on(gpu))
    estimate = forward_memory(model_sizes(path), layout, tokens, tokens // length * (length - PROMPT_LEN))
    peak = peak_of(engine, lambda: engine.forward(rows, with_entropy=True))
    assert estimate.total == pytest.approx(peak, rel=0.15), asdict(estimate)


def test_an_update_at_the_found_budget_stays_within_memory(build_engine, path, gpu, monkeypatch):
    engine = build_engine(path, max_tokens=1000, dtype="bfloat16", compile=False)
    limit = resident_bytes(engine) + (6 * 2**30 if gpu.type == "cuda" else 64 * 2**20)  # which a small model reaches
    monkeypatch.setattr(token_budget, "memory_limit", lambda *_: limit)
    monkeypatch.setattr(token_budget, "peak_memory_of", lambda call, device: peak_of(engine, call))
    length = 256
    engine.max_tokens = engine.find_token_budget(PROMPT_LEN, length - PROMPT_LEN, 1)
    assert length <= engine.max_tokens < token_budget.LARGEST
    rows = rows_of(2 * engine.max_tokens, length)
    for _ in range(2):
        peak = peak_of(engine, lambda: engine.update(rows, loss, with_entropy=True))
    assert peak <= 1.05 * limit
