from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hybridflow.algorithms import log_probs_and_entropy_from_logits
from hybridflow.models import forward as forward_module
from hybridflow.models.attention import PackedPlan, PaddedPlan
from hybridflow.models.forward import (
    MAX_LOGITS,
    MOST_INDEXED,
    OwnForward,
    max_logits_of,
    max_logits_on,
    parts_of_logits,
)
from hybridflow.models.forward_of import forward_of
from hybridflow.models.fused_forward import FusedForward
from hybridflow.models.kernels.library import use_kernels
from hybridflow.models.kv_cache import DecodePlan, KVCache, PrefillPlan
from hybridflow.models.loading import load_causal_lm, load_value_model

LENGTHS = [5, 9, 9, 2]
VARIANTS = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 1e4,
            }
        },
    ),
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
}


@pytest.fixture(params=[True, False], ids=["kernels", "pytorch"])
def kernels(request):
    use_kernels(request.param)
    yield request.param
    use_kernels(True)


def packed_input(vocabulary=40):
    tokens = torch.randint(vocabulary, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": tokens,
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "attention_plan": PackedPlan.from_lengths(LENGTHS),
    }


def logits_and_gradients(forward, model, inputs):
    logits = forward(**inputs)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(logits, list(parameters.values()), weights)
    return {"logits": logits.detach(), **dict(zip(parameters, gradients, strict=True))}


def error(ours, exact):
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("variant", ["llama with biases", "qwen3", "tied", "yarn"])
def test_fused_pass_equals_model_code(variant, kernels, tiny_model):
    family, config = VARIANTS[variant]
    model = load_causal_lm(tiny_model(family, **config))
    assert isinstance(forward_of(model), FusedForward)
    inputs = packed_input()
    fused = logits_and_gradients(forward_of(model), model, inputs)
    own = logits_and_gradients(OwnForward(model), model, inputs)
    for name, value in own.items():
        assert error(fused[name], value) < 2e-5, name


def test_bfloat16_fused_pass_is_as_close_to_float32_as_model_code(kernels, tiny_model):
    exact_model, model = (load_causal_lm(tiny_model("qwen3"), dtype) for dtype in (torch.float32, torch.bfloat16))
    inputs = packed_input()
    exact = logits_and_gradients(OwnForward(exact_model), exact_model, inputs)
    fused = logits_and_gradients(forward_of(model), model, inputs)
    own = logits_and_gradients(OwnForward(model), model, inputs)
    for name, value in exact.items():
        assert error(fused[name], value) < max(1.5 * error(own[name], value), 0.01), name


def test_critic_values_equal_those_of_model_code(kernels, tiny_model):
    model = load_value_model(tiny_model("qwen3"))
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    inputs = packed_input()
    torch.testing.assert_close(forward_of(model)(**inputs), OwnForward(model)(**inputs))


@pytest.mark.parametrize("of", [FusedForward, OwnForward])
def test_head_is_computed_for_requested_tokens(of, tiny_model):
    keep = torch.tensor([3, 0, 11])
    for model in (load_causal_lm(tiny_model()), load_value_model(tiny_model())):
        every = of(model)(**packed_input())
        torch.testing.assert_close(of(model)(**packed_input(), logits_to_keep=keep), every[:, keep])


class LargestTensor(TorchDispatchMode):
    """A recorder of the number of elements of the largest tensor that any operation creates."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        self.numel = max([self.numel, *(x.numel() for x in made if isinstance(x, torch.Tensor))])
        return result


def read_and_gradients(forward, model, inputs, positions):
    """Compute log-probs of a label and entropies at each position, and gradients of a loss of both."""
    labels = torch.randint(40, (len(positions),), generator=torch.Generator().manual_seed(1))
    inputs = dict(inputs)

    def read(logits, which):
        return log_probs_and_entropy_from_logits(logits, labels[which], temperature=0.7)

    log_probs, entropies = forward.read_logits(inputs.pop("input_ids"), positions, read, **inputs)
    weights = torch.randn(2, len(positions), generator=torch.Generator().manual_seed(2)).to(log_probs)
    parameters = dict(model.named_parameters())
    loss = (weights[0] * log_probs + weights[1] * entropies).sum()
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return {
        "log_probs": log_probs.detach(),
        "entropies": entropies.detach(),
        **dict(zip(parameters, gradients, strict=True)),
    }


@pytest.mark.parametrize("max_logits", [1, 40, 130, 10**6])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_reading_logits_in_parts_gives_the_same_results(layout, max_logits, kernels, tiny_model):
    model = load_causal_lm(tiny_model(), torch.float64)
    inputs, positions = packed_input(), torch.tensor([0, 3, 4, 9, 13, 14, 20, 24])
    if layout == "padded":
        inputs = {
            "input_ids": inputs["input_ids"][0, :24].view(3, 8),
            "position_ids": torch.arange(8).expand(3, 8),
            "attention_plan": PaddedPlan(),
        }
        positions = torch.tensor([3, 4, 9, 11, 22, 23])
    own = read_and_gradients(OwnForward(model), model, inputs, positions)
    fused = FusedForward(model)
    fused.max_logits = max_logits
    for name, value in read_and_gradients(fused, model, inputs, positions).items():
        # The norms of the model's code are float32 in every dtype.
        assert error(value, own[name]) < 1e-6, name


def test_read_logits_returns_no_views(tiny_model):
    """Otherwise FSDP2 warns on every rank."""
    inputs = packed_input()
    (values,) = FusedForward(load_causal_lm(tiny_model())).read_logits(
        inputs.pop("input_ids"), torch.tensor([0, 3]), lambda logits, which: (logits[:, 0],), **inputs
    )
    assert values._base is None


def test_logits_in_memory_are_limited(tiny_model):
    model = load_causal_lm(tiny_model(vocab_size=20_000, hidden_size=8, intermediate_size=8), torch.bfloat16)
    inputs, positions = packed_input(), torch.arange(sum(LENGTHS))
    forward = FusedForward(model)
    largest = {}
    for max_logits in (10**6, 60_000):
        forward.max_logits = max_logits
        with LargestTensor() as made:
            read_and_gradients(forward, model, inputs, positions)
        largest[max_logits] = made.numel
    assert largest[10**6] == sum(LENGTHS) * 20_000
    assert largest[60_000] == 20_000 * 8  # the gradient of the head


def test_other_activations_and_length_dependent_angles_use_model_code(tiny_model):
    assert isinstance(forward_of(load_causal_lm(tiny_model(hidden_act="gelu"))), OwnForward)
    for kind in ("dynamic", "longrope"):
        model = load_causal_lm(tiny_model())
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": kind}
        assert isinstance(forward_of(model), OwnForward)


def test_rotary_table_grows_with_positions(tiny_model):
    model = load_causal_lm(tiny_model())
    forward = forward_of(model)
    for start in (0, 3, 40):
        positions = torch.arange(start, start + 4)[None]
        inputs = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "position_ids": positions}
        inputs["attention_plan"] = PackedPlan.from_lengths([4])
        torch.testing.assert_close(forward(**inputs), OwnForward(model)(**inputs))


def decoded(forward, steps=3):
    """Compute the logits after each prompt of LENGTHS, then after a few more tokens in each row."""
    cache, plan = KVCache(torch.device("cpu")), PrefillPlan(LENGTHS)
    logits = [forward(**{**packed_input(), "attention_plan": plan}, logits_to_keep=torch.tensor(LENGTHS).cumsum(0) - 1)]
    cache.append(plan, torch.arange(len(LENGTHS)), max(LENGTHS) + steps)
    for step in range(steps):
        logits.append(forward.decode(torch.tensor([3, 1, 39, 7]) - step % 2, DecodePlan(cache, 4))[None])
        cache.lengths += 1
    return torch.cat(logits)


@pytest.mark.parametrize("variant", ["llama with biases", "qwen3", "tied", "llama3"])
def test_compiled_decoder_gives_logits_of_model_code(variant, tiny_model):
    family, config = VARIANTS[variant]
    exact_model, model = (load_causal_lm(tiny_model(family, **config), d) for d in (torch.float64, torch.float32))
    forward = forward_of(model)
    with torch.no_grad():
        exact = decoded(OwnForward(exact_model))
        uncompiled = error(decoded(forward), exact)
        forward.pack_weights()
        assert error(decoded(forward), exact) < max(1.5 * uncompiled, 2e-6)


def test_packed_weights_are_used_until_dropped(tiny_model):
    model = load_causal_lm(tiny_model())
    forward = forward_of(model)
    with torch.no_grad():
        forward.pack_weights()
        model.lm_head.weight.zero_()
        assert decoded(forward)[1:].any()
        forward.drop_packed_weights()
        assert not decoded(forward)[1:].any()


def test_gradients_use_model_weights_while_weights_are_packed(tiny_model):
    model = load_causal_lm(tiny_model())
    forward = forward_of(model)
    expected = logits_and_gradients(forward, model, packed_input())
    forward.pack_weights()
    for name, value in logits_and_gradients(forward, model, packed_input()).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("module", ["linear", "embedding"])
def test_a_subclass_is_called_and_not_packed(module, tiny_model):
    model = load_causal_lm(tiny_model())
    parent, name = (model.model.layers[0].self_attn, "o_proj") if module == "linear" else (model.model, "embed_tokens")
    plain = getattr(parent, name)

    class Changed(type(plain)):
        def forward(self, x):
            return 2 * super().forward(x) + 1

    changed = Changed(*reversed(plain.weight.shape), bias=False) if module == "linear" else Changed(*plain.weight.shape)
    changed.weight = plain.weight
    setattr(parent, name, changed)
    forward = forward_of(model)
    with torch.no_grad():
        forward.pack_weights()
        torch.testing.assert_close(decoded(forward), decoded(OwnForward(model)))


@pytest.mark.parametrize(
    ("device", "memory_bytes", "expected"),
    [
        ("cpu", 0, MAX_LOGITS),
        ("cuda", 8 * 2**30, MAX_LOGITS),
        ("cuda", 80 * 2**30, 80 * 2**30 // 32),
    ],
)
def test_a_large_gpu_keeps_more_logits(monkeypatch, device, memory_bytes, expected):
    properties = SimpleNamespace(total_memory=memory_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert max_logits_on(torch.device(device)) == expected


@pytest.mark.parametrize(
    ("tokens", "memory_gib", "size", "first_kept"),
    [
        (1000, 8, 1766, 0),
        (2000, 8, 1766, 1766),  # only as many are kept as are computed at once
        (15360, 80, 8833, 0),  # 80 GiB keep 17,667 tokens
        (30000, 80, 8833, 2 * 8833),
        (30000, 141, MOST_INDEXED // 151936, 0),
    ],
)
def test_the_last_logits_are_kept_and_the_others_computed_twice(tokens, memory_gib, size, first_kept):
    assert parts_of_logits(tokens, 151936, max_logits_of(memory_gib * 2**30)) == (size, first_kept)


@pytest.mark.parametrize(("max_logits", "computed_twice"), [(400, 0), (4 * 40, 5), (1, 8)])
def test_kept_logits_are_computed_once_with_equal_results(tiny_model, monkeypatch, max_logits, computed_twice):
    """Count the products of the head: one forward and two backward, and one more of tokens that are not kept."""
    monkeypatch.setattr(forward_module, "MAX_LOGITS", 40)
    monkeypatch.setattr(forward_module, "PARTS_KEPT", 400)  # parts of one token
    model, inputs = load_causal_lm(tiny_model()), packed_input()
    forward = FusedForward(model)

    def compute(positions, max_logits):
        forward.max_logits = max_logits
        with FlopCounterMode(display=False) as counter:
            results = read_and_gradients(forward, model, inputs, torch.arange(positions))
        return results, counter.get_total_flops()

    (results, flops), (_, flops_of_one) = compute(9, max_logits), compute(1, max_logits)
    assert flops - flops_of_one == (3 * 8 + computed_twice) * 2 * 40 * model.config.hidden_size
    expected, _ = compute(9, 1)
    assert all(torch.equal(value, expected[name]) for name, value in results.items())
