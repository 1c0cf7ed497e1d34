"""Memory that runs out in each part of an engine's life; one call raises PyTorch's error."""

import pytest
import torch

from hybridflow.engines import token_budget
from hybridflow.errors import ModelError


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def loss(outputs, part):
    return -outputs["log_probs"].sum() / 40, {}


def test_out_of_memory_in_a_backward_pass_changes_nothing(build_engine, tiny_model, rows):
    engine, other = (build_engine(tiny_model("qwen2"), max_tokens=16) for _ in range(2))

    class Costly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        backward = staticmethod(out_of_memory)

    def costly(outputs, part):
        return loss({name: Costly.apply(values) for name, values in outputs.items()}, part)

    message = (
        r"^out of memory in an update, nothing was applied: CUDA out of memory\. Tried to allocate 2\.00 GiB; .* GiB "
        r"available; set a smaller memory\.max_tokens_per_micro_batch, .*memory\.offload for roles that can wait\.$"
    )
    with pytest.raises(ModelError, match=message):
        engine.update(rows, costly)
    assert engine.update(rows, loss) == other.update(rows, loss)


def test_out_of_memory_in_a_forward_pass_names_it(build_engine, tiny_model, rows, monkeypatch):
    engine = build_engine(tiny_model("qwen2"))
    monkeypatch.setattr(engine.model_forward, "read_logits", out_of_memory)
    with pytest.raises(ModelError, match=r"^out of memory in a forward pass, nothing was applied: CUDA out of memory"):
        engine.forward(rows)


def test_out_of_memory_in_an_optimizer_step_says_what_to_restart(build_engine, tiny_model, rows, monkeypatch):
    engine = build_engine(tiny_model("qwen2"))
    monkeypatch.setattr(engine.learner.optimizer, "step", out_of_memory)
    with pytest.raises(ModelError, match=r"in an optimizer step, which may be applied in part \(restart from the last"):
        engine.update(rows, loss)


def test_out_of_memory_in_a_trial_of_the_budget_names_its_size(build_engine, tiny_model, monkeypatch):
    monkeypatch.setattr(token_budget, "_try", out_of_memory)
    with pytest.raises(ModelError, match=r"the trial of 1 sequences of 12 tokens .* set memory\.max_tokens_per_mi"):
        build_engine(tiny_model("qwen2")).find_token_budget(4, 8, 1)
