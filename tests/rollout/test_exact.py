"""Exact log-probs: those of training are those of sampling, bit for bit, and each other order of a sum is seen."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fixtures.exact_log_probs import VOCABULARY, compared, gradients_of, num_exact_tokens, rows_of, sampled
from hybridflow.algorithms import log_probs_from_logits
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine, row_forward
from hybridflow.errors import ModelConfigError, RolloutConfigError, RolloutError
from hybridflow.models import exact_attention, exact_forward, fused_forward
from hybridflow.models.attention import run_attention
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.kernels import exact
from hybridflow.models.kernels.attention import causal_attention
from hybridflow.models.kernels.library import serves
from hybridflow.models.loading import load_causal_lm
from hybridflow.rollout import EmbeddedRollout
from hybridflow.workers.exact_samples import require_exact

ROOT = Path(__file__).parents[2]
TRITON = ROOT / ".triton"
pytestmark = pytest.mark.skipif(not serves(torch.zeros(0)), reason="no compiled kernels")


@pytest.mark.parametrize(
    "seeds",
    [range(3), *(pytest.param(range(i, i + 20), marks=pytest.mark.exhaustive) for i in range(3, 203, 20))],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
def test_log_probs_of_training_are_those_of_sampling(tiny_model, restores_the_process, seeds):
    """Also with a lag, under the weights of the version, and resumed, by engines that are built from a snapshot."""
    assert sum(num_exact_tokens(tiny_model, seed) for seed in seeds) > 50 * len(seeds)


def in_halves(x, weight, bias=None, residual=None):
    half = x.shape[1] // 2
    first = exact.exact_linear(x[:, :half], weight[:, :half], bias, residual)
    return exact.exact_linear(x[:, half:], weight[:, half:], None, first)


def in_reverse(x, weight, bias=None, residual=None):
    return exact.exact_linear(x.flip(1), weight.flip(1), bias, residual)


def rounded_twice(x, weight, bias=None, residual=None):
    return residual + exact.exact_linear(x, weight, bias)


def norm_by_torch(x, weight, epsilon):
    wide = x.float()
    return (weight.float() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def norm_in_reverse(x, weight, epsilon, norm=fused_forward.rms_norm):
    return norm(x.flip(1), weight.flip(0), epsilon).flip(1)


def rotary_in_double(x, cos, sin):
    first, second = x.double().chunk(2, -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def one_by_one(query, key, value, families, scaling):
    (lengths,) = zip(*families, strict=True)
    parts = zip(*(x.split(lengths) for x in (query, key, value)), lengths, strict=True)
    return torch.cat([run_attention(q, k, v, 1, n, AttentionForm(scaling)) for q, k, v, n in parts])


def split_heads(query, key, value, families, scaling):
    return exact.exact_attention(query.flip(2), key.flip(2), value, families, scaling)


def log_prob_in_reverse(logits, labels, **settings):
    return exact.exact_log_probs(logits.flip(1), logits.shape[1] - 1 - labels, **settings)


def log_prob_by_torch(logits, labels, temperature, with_entropy):
    return log_probs_from_logits(logits, labels, temperature=temperature), None


def log_prob_of_divided(logits, labels, temperature, with_entropy):
    return exact.exact_log_probs(logits / temperature, labels)


PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm")
REORDERED = {
    **{f"{name} in halves": (exact_forward, "exact_linear", in_halves, name) for name in PRODUCTS},
    **{f"{name} in reverse": (exact_forward, "exact_linear", in_reverse, name) for name in PRODUCTS},
    **{f"{x} rounded twice": (exact_forward, "exact_linear", rounded_twice, x) for x in ("o_proj", "down_proj")},
    **{f"{name} by torch": (fused_forward, "rms_norm", norm_by_torch, name) for name in NORMS},
    **{f"{name} in reverse": (fused_forward, "rms_norm", norm_in_reverse, name) for name in NORMS},
    "rotary in float64": (fused_forward, "rotary", rotary_in_double, None),
    "silu by torch": (fused_forward, "silu_mul", lambda gate, up: torch.nn.functional.silu(gate) * up, None),
    "attention of the training kernel": (exact_attention, "exact_attention", causal_attention, None),
    "attention by torch": (exact_attention, "exact_attention", one_by_one, None),
    "attention with heads in reverse": (exact_attention, "exact_attention", split_heads, None),
    "log-probs by torch": (row_forward, "exact_log_probs", log_prob_by_torch, None),
    "log-probs in reverse": (row_forward, "exact_log_probs", log_prob_in_reverse, None),
    "logits divided first": (row_forward, "exact_log_probs", log_prob_of_divided, None),
}
"""Operations of training in which a sum is made in another order: the module, its name there, and of which weights."""


@pytest.fixture(scope="module")
def trained(tiny_model):
    """Return engines in float32 and in bfloat16, each with rows that it has sampled."""
    built = {}
    for dtype in ("float32", "bfloat16"):
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160}
        path = tiny_model("qwen2", vocab_size=VOCABULARY, max_position_embeddings=2048, **sizes)
        memory, model = MemoryConfig(share_prompts=False), ModelConfig(dtype=dtype)
        engine = TorchEngine(str(path), "policy", model=model, memory=memory, exact=True)
        rollout = EmbeddedRollout(engine.model, exact=True)
        built[dtype] = engine, rows_of(*sampled(rollout, random.Random(1), 0.7, lengths=[40]))
    return built


def test_without_a_change_nothing_differs(trained):
    for engine, rows in trained.values():
        assert compared(rows, engine.forward(rows, temperature=0.7)["log_probs"]) > 300


@pytest.mark.parametrize("change", REORDERED)
def test_another_order_of_a_sum_is_seen(trained, change, monkeypatch):
    where, name, planted, weights = REORDERED[change]
    engine, rows = trained["bfloat16" if "twice" in change else "float32"]
    real = getattr(where, name)
    chosen = {p.data_ptr() for key, p in engine.model.named_parameters() if weights and weights in key}

    def patched(x, *arguments, **settings):
        is_chosen = not chosen or arguments[0].data_ptr() in chosen
        return (planted if is_chosen else real)(x, *arguments, **settings)

    monkeypatch.setattr(where, name, patched)
    with pytest.raises(RolloutError, match="sampled tokens have another log-prob in training, the first in row"):
        require_exact(rows, engine.forward(rows, temperature=0.7)["log_probs"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_those_of_other_kernels(trained, dtype):
    engine, rows = trained["float32"]

    def results(exact, dtype):
        parts = {"model": ModelConfig(dtype=dtype), "memory": MemoryConfig(), "optimizer": OptimizerConfig(lr=0.0)}
        learner = TorchEngine(engine.path, "policy", exact=exact, **parts)
        gradients = gradients_of(learner, rows)
        return gradients, learner.forward(rows, temperature=0.7, with_entropy=True)

    (found, outputs), (wanted, others) = results(True, "float32"), results(False, dtype)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), wanted[name].double(), rtol=1e-3, atol=1e-5)
    for name in ("log_probs", "entropies"):
        difference = (outputs[name] - others[name])[rows.batch["response_mask"]]
        assert difference.abs().max() < 5e-5


def test_the_backward_pass_leaves_logits_as_they_are():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = logits.detach().clone()
    exact.exact_log_probs(logits, torch.tensor([4, 0, 49]), temperature=0.7)[0].sum().backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("family", "sizes", "options", "problem"),
    [
        ("llama", {}, {"dtype": "float64"}, "no compiled kernels serve torch.float64"),
        ("mistral", {}, {}, "'mistral' models have no fused forward pass"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, {}, "'qwen2' models with windows, .*have no"),
        ("llama", {"intermediate_size": 51}, {"dtype": "bfloat16"}, "odd .* model.dtype='float32' takes"),
        ("llama", {}, {"compile": True}, "set model.compile = false"),
    ],
)
def test_where_log_probs_cannot_be_exact_an_error_says_why(tiny_model, family, sizes, options, problem):
    directory = str(tiny_model(family, **sizes))
    with pytest.raises(ModelConfigError, match=f"rollout.exact=true .*{problem}"):
        TorchEngine(directory, "policy", model=ModelConfig(**options), memory=MemoryConfig(), exact=True)


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: Triton is not in this environment")
def test_kernels_of_triton_are_exact_in_its_interpreter(tmp_path):
    if not (TRITON / "triton").exists():
        pytest.skip("Triton is not installed in .triton; run `make .triton`, or `make test-all`.")
    path = os.pathsep.join([str(ROOT / "src"), str(TRITON)])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"}
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}"]
    command = [sys.executable, "-m", "pytest", *options, Path(__file__).with_name("exact_in_triton.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]


def test_exact_log_probs_have_no_pages_on_a_cpu(tiny_model):
    with pytest.raises(
        RolloutConfigError, match=r"paged=True is not supported with exact=True on cpu: .*; leave paged out"
    ):
        EmbeddedRollout(load_causal_lm(tiny_model()), exact=True, paged=True)
