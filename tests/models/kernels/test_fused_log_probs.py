"""The fused log-probs equal those of softmax in float64; the exhaustive ones compile them for the CPU."""

import math
import sys

import pytest
import torch

from hybridflow.algorithms import log_probs_and_entropy_from_logits, log_probs_from_logits
from hybridflow.models.kernels.fused_log_probs import _backward, _forward, fused_log_probs
from hybridflow.runtime.device import take_compilations

fused = sys.modules[_forward.__module__]  # the package has a function of the same name
TOKENS, ENTRIES = 6, 37


def example(dtype, tokens=TOKENS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(tokens, ENTRIES, generator=generator, dtype=torch.float64)
    logits[0, 3] = -math.inf  # a masked entry, which is not the label
    labels = torch.randint(4, ENTRIES, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    return logits.to(dtype), labels, weights


def expected(logits, labels, weights, temperature, with_entropy):
    """Return log-probs, entropies and the gradient of their weighted sum in float64."""
    logits = logits.double().requires_grad_()
    log_p = (logits / temperature).log_softmax(-1)
    log_probs = log_p.gather(-1, labels[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    ((weights[0] * log_probs).sum() + (weights[1] * entropies).sum() * with_entropy).backward()
    return log_probs.detach(), entropies.detach(), logits.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_fused_values_and_gradients_equal_softmax_in_float64(temperature, with_entropy):
    logits, labels, weights = example(torch.float64)
    log_probs, entropies, log_normalizer = _forward(logits, labels, temperature, with_entropy)
    grads = (weights[0], weights[1] if with_entropy else None)
    gradient = _backward(logits, labels, log_normalizer, entropies, *grads, temperature)
    wanted = expected(logits, labels, weights, temperature, with_entropy)
    torch.testing.assert_close(log_probs, wanted[0])
    torch.testing.assert_close(gradient, wanted[2])
    if entropies is None:
        assert not with_entropy
    else:
        torch.testing.assert_close(entropies, wanted[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_arithmetic_is_float32_and_gradients_have_the_dtype_of_logits(dtype):
    logits, labels, weights = example(dtype)
    log_probs, entropies, log_normalizer = _forward(logits, labels, 1.0, True)
    gradient = _backward(logits, labels, log_normalizer, entropies, *weights.float(), 1.0)
    assert {log_probs.dtype, entropies.dtype, log_normalizer.dtype} == {torch.float32}
    assert gradient.dtype == dtype
    wanted = expected(logits, labels, weights, 1.0, True)
    torch.testing.assert_close(log_probs.double(), wanted[0], rtol=1e-5, atol=1e-5)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gradient.double(), wanted[2], rtol=rounding, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: torch compiles in processes")
@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
def test_compiled_log_probs_equal_the_sliced_ones_for_any_number_of_tokens():
    torch._dynamo.reset()
    take_compilations()
    counts = []
    for tokens in (5, 9, 32, 33):
        logits, labels, weights = example(torch.float32, tokens, seed=tokens)
        gradients = []
        for fused in (True, False):
            leaf = logits.clone().requires_grad_()
            if fused:
                (log_probs, _), both = (
                    fused_log_probs(leaf, labels),
                    fused_log_probs(leaf, labels, temperature=0.7, with_entropy=True),
                )
            else:
                log_probs = log_probs_from_logits(leaf, labels)
                both = log_probs_and_entropy_from_logits(leaf, labels, temperature=0.7)
            values = torch.stack([log_probs, *both])
            (weights[0].float() * values).sum().backward()
            gradients.append((values.detach(), leaf.grad))
        torch.testing.assert_close(gradients[0], gradients[1])
        counts.append(take_compilations())
    assert counts[0] > 0
    assert counts[1:] == [0, 0, 0]


def test_every_call_allows_enough_variants_of_a_compiled_pass(monkeypatch):
    """The setting is of a thread in newer versions of torch, and on a GPU the backward pass has its own thread."""
    monkeypatch.setattr(fused, "_compiled", lambda function: function)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    limits = []
    logits, labels, _ = example(torch.float32)
    leaf = logits.clone().requires_grad_()
    log_probs, _ = fused_log_probs(leaf, labels)
    limits.append(torch._dynamo.config.recompile_limit)
    torch._dynamo.config.recompile_limit = 8
    log_probs.sum().backward()
    limits.append(torch._dynamo.config.recompile_limit)
    assert limits == [fused.MAX_VARIANTS] * 2
