"""The token budget: the extrapolation of measured peaks, and the error if one sequence does not fit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridflow.engines import token_budget
from hybridflow.errors import ModelError


@pytest.fixture
def engine(tiny_model, build_engine):
    return build_engine(tiny_model("qwen2"))


def moments_of(engine):
    """Return the bytes of Adam's moments, which the trials do not allocate."""
    return 2 * sum(4 * parameter.numel() for parameter in engine.parameters.values())


def memory(monkeypatch, *, limit, base, per_token):
    """Simulate memory in which a micro-batch takes exactly `base + per_token * tokens` bytes; trials still run."""
    tried = []

    def peak(call, device):
        call()
        return base + per_token * tried[-1]

    rows_of = token_budget._rows
    monkeypatch.setattr(
        token_budget, "_rows", lambda count, *lengths: tried.append(count * sum(lengths)) or rows_of(count, *lengths)
    )
    monkeypatch.setattr(token_budget, "peak_memory_of", peak)
    monkeypatch.setattr(token_budget, "memory_limit", lambda *_: limit)


def test_budget_fits_in_memory_beside_the_model(engine, monkeypatch):
    memory(monkeypatch, limit=10_000_000 + moments_of(engine), base=2_000_000, per_token=1000)
    assert engine.find_token_budget(4, 4, 1) == 8000 // 256 * 256
    assert all(parameter.grad is None for parameter in engine.parameters.values())
    assert engine.num_updates == 0


def test_budget_is_between_longest_sequence_and_maximum(engine, monkeypatch):
    memory(monkeypatch, limit=2_009_000 + moments_of(engine), base=2_000_000, per_token=1000)
    assert engine.find_token_budget(4, 4, 1) == 8
    memory(monkeypatch, limit=10**15, base=0, per_token=1)
    assert engine.find_token_budget(4, 4, 1) == token_budget.LARGEST


def test_budget_is_of_a_rank_that_has_its_part_of_each_sequence(monkeypatch):
    memory(monkeypatch, limit=10_000_000, base=2_000_000, per_token=1000)  # of a rank, for tokens of all ranks
    monkeypatch.setattr(token_budget, "_try", lambda *_: None)
    forward: Any = SimpleNamespace(device=torch.device("cpu"), ranks=SimpleNamespace(sequence=4, is_alone=True))
    assert token_budget.find_token_budget(forward, None, 4, 4, 1) == 8000 // 256 * 256 // 4


def test_sequence_that_does_not_fit_is_an_error_with_settings(engine, monkeypatch):
    memory(monkeypatch, limit=2_007_000 + moments_of(engine), base=2_000_000, per_token=1000)
    with pytest.raises(ModelError, match=r"one sequence of 8 tokens needs .* set model\.gradient_checkpointing = true"):
        engine.find_token_budget(4, 4, 1)


@pytest.mark.parametrize("learns", [True, False])
def test_real_trial_gives_a_budget(tiny_model, build_engine, learns):
    engine = build_engine(tiny_model("qwen2"), learns=learns)
    budget = engine.find_token_budget(24, 40, 1)
    assert 64 <= budget <= token_budget.LARGEST


def test_measured_memory_grows_with_tokens(tiny_model, build_engine):
    """Measure the memory of a larger micro-batch, on a model that is large enough for the measurement."""
    from hybridflow.runtime.memory import peak_memory_of

    engine = build_engine(tiny_model("qwen2", vocab_size=4000, max_position_embeddings=1024), max_tokens=100_000)

    def trial(count):
        token_budget._try(engine.row_forward, engine.learner, token_budget._rows(count, 8, 504))

    peaks = [peak_memory_of(lambda count=count: trial(count), engine.device) for count in (1, 1, 16)]
    assert peaks[2] - peaks[1] > 16 * 504 * 4000 * 4  # the logits alone


def test_gradient_of_an_earlier_micro_batch_counts(engine):
    from fixtures.peak_memory import peak_bytes

    rows, gradient = (
        token_budget._rows(16, 4, 60),
        sum(4 * parameter.numel() for parameter in engine.parameters.values()),
    )

    def learn():
        engine.learner.learn(rows, lambda outputs, part: (-outputs["log_probs"].mean(), {}), True, 1.0)

    alone, trial = peak_bytes(learn), peak_bytes(lambda: token_budget._try(engine.row_forward, engine.learner, rows))
    engine.learner.optimizer.zero_grad(set_to_none=True)
    assert alone < trial <= alone + gradient  # a part of the gradient is there at the peak in both


def test_moments_count_until_the_optimizer_has_them(tiny_model, build_engine, monkeypatch):
    engine = build_engine(tiny_model("qwen2"))
    memory(monkeypatch, limit=2_000_000 + moments_of(engine) + 600_000, base=2_000_000, per_token=1000)
    assert engine.find_token_budget(4, 4, 1) == 512
    for parameter in engine.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    engine.learner.optimizer.step()
    memory(monkeypatch, limit=2_000_000 + 600_000, base=2_000_000, per_token=1000)
    assert engine.find_token_budget(4, 4, 1) == 512


def test_no_prompt_of_the_trials_is_shared(tiny_model, build_engine, monkeypatch):
    from hybridflow.engines import row_forward

    computed, pack = [], row_forward.pack

    def recording(batch, **settings):
        arranged = pack(batch, **settings)
        computed.append((len(batch) * 304, arranged.input_ids.numel()))
        return arranged

    monkeypatch.setattr(row_forward, "pack", recording)
    engine = build_engine(tiny_model("qwen2", max_position_embeddings=1024), max_tokens=100_000)
    engine.find_token_budget(300, 4, 1)
    trials = [304, 304, 304, 608, 304, 2432]  # each after one row, whose gradient is there
    assert [tokens for tokens, _ in computed] == [tokens for _, tokens in computed] == trials
