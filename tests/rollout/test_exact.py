"""Exact log-probs: those of training are those of sampling, bit for bit, and each other order of a sum is seen."""

import copy
import random

import pytest
import torch

from hybridflow.algorithms import log_probs_from_logits
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine, row_forward
from hybridflow.errors import ModelConfigError, RolloutConfigError, RolloutError
from hybridflow.models import attention, exact_forward, fused_forward
from hybridflow.models.attention import run_attention
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.kernels import exact
from hybridflow.models.kernels.attention import causal_attention
from hybridflow.models.kernels.library import serves
from hybridflow.models.loading import build_with_placeholders, load_causal_lm
from hybridflow.protocol import DataProto
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.workers.exact_samples import exactly, require_exact
from hybridflow.workers.generating import rollout_batch

pytestmark = pytest.mark.skipif(not serves(torch.zeros(0)), reason="no compiled kernels")
VOCABULARY = 300


def model_of(tiny_model, chosen):
    heads, kv_heads, dim = chosen.choice([(4, 2, 16), (3, 1, 32), (2, 2, 64), (6, 3, 8)])
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * dim}
    sizes |= {"intermediate_size": chosen.choice([70, 160]), "max_position_embeddings": 2048}
    family, tied = chosen.choice(["llama", "qwen2", "qwen3"]), chosen.choice([True, False])
    if family == "llama":  # the others have no choice of biases
        sizes |= {name: chosen.choice([True, False]) for name in ("attention_bias", "mlp_bias")}
    if family != "qwen2":
        sizes["head_dim"] = dim
    return tiny_model(family, vocab_size=VOCABULARY, tie_word_embeddings=tied, **sizes)


def engine_of(path, chosen, dtype):
    memory = MemoryConfig(
        max_tokens_per_micro_batch=chosen.choice([700, 16384]),
        packing=chosen.choice([True, False]),
        share_prompts=chosen.choice([True, False]),
    )
    model = ModelConfig(dtype=dtype, gradient_checkpointing=chosen.choice([True, False]))
    return TorchEngine(str(path), "policy", model=model, memory=memory, optimizer=OptimizerConfig(lr=0.05), exact=True)


def sampled(rollout, chosen, temperature, lengths=(1, 9, 40)):
    """Return prompts and completions of requests, of which some go on where others have ended."""
    sampling = SamplingParams(
        chosen.choice(lengths),
        temperature=temperature,
        top_k=chosen.choice([0, 0, 7]),
        top_p=chosen.choice([1.0, 1.0, 0.8]),
        stop_token_ids=(3, 5) if chosen.random() < 0.5 else (),
    )
    prompts = [[chosen.randrange(VOCABULARY) for _ in range(chosen.choice([1, 5, 33, 150, 300]))] for _ in range(5)]
    size = chosen.choice([1, 3])
    asked = [Request(i, prompt, sampling, size, (7, 0, i), keep=True) for i, prompt in enumerate(prompts)]
    done = generate(rollout, asked)
    goes_on = [[*asked[c.request_id].prompt_ids, *c.token_ids, 8, 9] for c in done[:4]]
    more = [Request(10 + i, prompt, sampling, 1, (8, 0, i)) for i, prompt in enumerate(goes_on)]
    more_done = generate(rollout, more)
    prompts_of = [prompts[c.request_id] for c in done] + [goes_on[c.request_id - 10] for c in more_done]
    return prompts_of, [*done, *more_done]


def rows_of(prompts, completions):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return DataProto.from_dict(rollout_batch(ids, mask, completions, pad_token_id=0))


def compared(rows, log_probs):
    require_exact(rows, log_probs)
    return int(rows.batch["response_mask"].sum())


@pytest.mark.parametrize(
    "seeds",
    [range(3), *(pytest.param(range(i, i + 20), marks=pytest.mark.exhaustive) for i in range(3, 203, 20))],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
def test_log_probs_of_training_are_those_of_sampling(tiny_model, restores_the_process, seeds):
    """Also with a lag, under the weights of the version, and resumed, by engines that are built from a snapshot."""
    num_tokens = 0
    for seed in seeds:
        chosen, lag, is_resumed = random.Random(seed), seed % 3, seed % 2 == 0
        path, dtype = model_of(tiny_model, chosen), chosen.choice(["float32", "bfloat16"])
        temperature = chosen.choice([1.0, 0.7, 1.3, 0.0])

        def trainer(state, path=path, chosen=chosen, dtype=dtype):
            engine = engine_of(path, chosen, dtype)
            engine.load_state_dict(state)
            return engine

        def sampler(engine, path=path, chosen=chosen, lag=lag):
            return EmbeddedRollout(
                build_with_placeholders(path, "policy", engine.compute_dtype, engine.device) if lag else engine.model,
                shares_model=not lag,
                exact=True,
                max_running_sequences=chosen.choice([3, 1024]),
                pack_weights=chosen.choice([True, False]),
            )

        engine = engine_of(path, chosen, dtype)
        rollout = sampler(engine)
        for version in range(2):  # before and after an update
            weights = [(name, weight.clone() if lag else weight) for name, weight in engine.weights()]
            load_weights(rollout, weights, version=version)
            rows = rows_of(*sampled(rollout, chosen, temperature))
            if lag:
                state = copy.deepcopy(engine.state_dict())
                for _ in range(lag):  # the trainer goes on, the sampler does not
                    engine.update(rows, loss, temperature=temperature)
                rows = rows_of(*sampled(rollout, chosen, temperature))
                engine = trainer(state)
            torch.set_num_threads(chosen.choice([1, 2]))
            num_tokens += compared(rows, engine.forward(rows, temperature=temperature)["log_probs"])
            engine.update(rows, exactly(loss), temperature=temperature, with_entropy=chosen.choice([True, False]))
            if is_resumed:
                engine = trainer(engine.state_dict())
                rollout = sampler(engine)
    assert num_tokens > 50 * len(seeds)


def loss(outputs, part):
    return -outputs["log_probs"].sum() / 100, {}


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
    "attention of the training kernel": (attention, "exact_attention", causal_attention, None),
    "attention by torch": (attention, "exact_attention", one_by_one, None),
    "attention with heads in reverse": (attention, "exact_attention", split_heads, None),
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

    def loss(outputs, part):
        mask = part.batch["response_mask"]
        return (outputs["log_probs"] * mask).sum() / 100 - (outputs["entropies"] * mask).sum() / 300, {}

    def results(exact, dtype):
        parts = {"model": ModelConfig(dtype=dtype), "memory": MemoryConfig(), "optimizer": OptimizerConfig(lr=0.0)}
        learner = TorchEngine(engine.path, "policy", exact=exact, **parts)
        gradients = gradients_of(learner, rows, loss)
        return gradients, learner.forward(rows, temperature=0.7, with_entropy=True)

    (found, outputs), (wanted, others) = results(True, "float32"), results(False, dtype)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), wanted[name].double(), rtol=1e-3, atol=1e-5)
    for name in ("log_probs", "entropies"):
        difference = (outputs[name] - others[name])[rows.batch["response_mask"]]
        assert difference.abs().max() < 5e-5


def gradients_of(learner, rows, loss):
    kept = {}
    for name, parameter in learner.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: kept.update({name: p.grad.clone()}))
    learner.update(rows, loss, temperature=0.7, with_entropy=True)
    return kept


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


def test_exact_log_probs_have_no_pages(tiny_model):
    with pytest.raises(RolloutConfigError, match=r"paged=True is not supported with exact=True: .*; leave paged out"):
        EmbeddedRollout(load_causal_lm(tiny_model()), exact=True, paged=True)
