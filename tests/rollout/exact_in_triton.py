"""Exact log-probs by the kernels of Triton, which its interpreter computes on a CPU; `test_exact.py` starts it.

Triton reads TRITON_INTERPRET when a kernel is defined, so this is a process. Parts and tiles are small here, so that
sequences have several.
"""

import random

import pytest
import torch

from fixtures.exact_log_probs import VOCABULARY, compared, gradients_of, num_exact_tokens, rows_of, sampled
from fixtures.triton_interpreter import mend_interpreter
from hybridflow.algorithms import log_probs_and_entropy_from_logits
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.errors import RolloutError
from hybridflow.models import exact_attention, exact_forward
from hybridflow.models.kernels import exact, triton_exact, triton_paged_attention, triton_support
from hybridflow.models.kernels.library import use_kernels
from hybridflow.rollout import EmbeddedRollout

mend_interpreter()
LENGTHS = {"lengths": (1, 4), "prompt_lengths": (1, 5, 34), "num_prompts": 2}


use_kernels(False)
triton_support.DEVICE = "cpu"
triton_paged_attention.SPLIT, triton_paged_attention.BLOCK = 32, 16
triton_exact.TILES, triton_exact.CHUNK = {2: (32, 16, 16), 4: (16, 32, 16)}, 128


@pytest.mark.parametrize("seed", range(2))
def test_log_probs_of_training_are_those_of_sampling_in_pages(tiny_model, restores_the_process, seed):
    assert num_exact_tokens(tiny_model, seed, paged=True, **LENGTHS) > 10


@pytest.fixture(scope="module")
def trained(tiny_model):
    """Return an engine, and rows that it has sampled, of more keys than those of one part."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    path = tiny_model("qwen2", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=48, **sizes)
    engine = TorchEngine(str(path), "policy", model=ModelConfig(dtype="float32"), memory=MemoryConfig(), exact=True)
    rollout = EmbeddedRollout(engine.model, exact=True, paged=True)
    rows = rows_of(*sampled(rollout, random.Random(1), 0.7, lengths=[3], prompt_lengths=[34], num_prompts=1))[:3]
    assert compared(rows, engine.forward(rows, temperature=0.7)["log_probs"]) == 9
    return engine, rows


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (triton_exact, "TILES", {4: (16, 32, 32)}),
        (triton_exact, "CHUNK", 64),
        (triton_paged_attention, "BLOCK", 32),
        (triton_paged_attention, "SPLIT", 16),
        (exact_forward, "recomputed", lambda function, *arguments: function(*arguments)),
        (exact_attention, "recomputed", lambda function, *arguments, reference: reference(*arguments)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_order_of_a_sum_in_training_is_seen(trained, module, name, value, monkeypatch):
    engine, rows = trained
    monkeypatch.setattr(module, name, value)
    with pytest.raises(RolloutError, match="sampled tokens have another log-prob in training"):
        compared(rows, engine.forward(rows, temperature=0.7)["log_probs"])


def test_gradients_are_those_of_other_kernels(trained):
    engine, rows = trained

    def gradients(exact):
        parts = {"model": ModelConfig(dtype="float32"), "memory": MemoryConfig(), "optimizer": OptimizerConfig(lr=0.0)}
        return gradients_of(TorchEngine(engine.path, "policy", exact=exact, **parts), rows)

    found, wanted = gradients(True), gradients(False)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_depends_on_its_row_alone(dtype):
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in [(1, 16, 32), (70, 50, 45), (33, 96, 130)]:
        x, weight, bias, residual = (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
        )
        found = triton_exact.linear(x, weight, bias, residual)
        wanted = x.double() @ weight.double().T + bias.double() + residual.double()
        torch.testing.assert_close(found.double(), wanted, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-2)
        last = triton_exact.linear(x[-1:], weight, bias, residual[-1:])
        assert torch.equal(last, found[-1:])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NaN and inf at its end
def test_log_probs_and_their_gradients_are_those_of_pytorch():
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(5, 300, generator=generator)).requires_grad_()
    logits.data[1, 7] = -torch.inf
    labels = torch.tensor([3, 299, 128, 0, 40])
    wanted = log_probs_and_entropy_from_logits(logits.double(), labels, temperature=0.7)
    found = exact.exact_log_probs(logits, labels, temperature=0.7, with_entropy=True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        gradients = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    temperatures = torch.tensor([0.7, 0.0, 1.0, 1.3, 0.7], dtype=torch.float64)
    each, _ = exact.exact_log_probs(logits, labels, temperature=temperatures)
    assert torch.equal(each[[0, 4]], found[0][[0, 4]])
    assert torch.equal(each[1:3], exact.exact_log_probs(logits, labels)[0][1:3])
    logits.data[2, 5] = torch.nan
    logits.data[3, 5] = torch.inf
    assert exact.exact_log_probs(logits, labels)[0].isfinite().tolist() == [True, True, False, False, True]
