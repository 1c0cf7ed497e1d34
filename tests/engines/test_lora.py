"""Adapters: what is trained, what they compute, and that the model without them equals the base model."""

import pytest
import torch

from fixtures.families import write_family
from hybridflow.config import LoRAConfig
from hybridflow.errors import CheckpointError, ModelError
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.lora import add_adapters

LORA = {"rank": 3, "alpha": 6.0}


@pytest.fixture
def build(tiny_model, build_engine):
    return lambda lora=LORA, dtype="float64", seed=0: build_engine(
        tiny_model("qwen2"), dtype=dtype, weight_decay=0.0, lora=lora, seed=seed
    )


def loss(outputs, part):
    return (outputs["log_probs"] * torch.linspace(-1, 1, 24, dtype=outputs["log_probs"].dtype).view(4, 6)).sum(), {}


def learn(engine, rows):
    engine.learner.learn(rows, loss, False, 1.0)
    return {name: parameter.grad for name, parameter in engine.parameters.items()}


def test_only_adapters_are_trained_and_initially_change_nothing(build, rows):
    adapted, plain = build(), build(None)
    assert all(".lora_" in name for name in adapted.parameters)
    assert len(adapted.parameters) == 2 * 7 * 2  # A and B of seven layers in each of two blocks
    torch.testing.assert_close(*(engine.forward(rows)["log_probs"] for engine in (adapted, plain)), rtol=0, atol=1e-12)
    before = {name: p.detach().clone() for name, p in adapted.model.named_parameters()}
    adapted.update(rows, loss)
    changed = {name for name, p in adapted.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in adapted.parameters if "lora_B" in name}  # A's gradient is zero while B is


def test_gradient_is_that_of_the_weight_times_the_other_factor(build, rows):
    adapted, whole = build(), build(None)
    of_adapters, of_weights = learn(adapted, rows), learn(whole, rows)
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        first = adapted.parameters[f"{layer}.lora_A.default.weight"]
        expected = 2 * of_weights[f"{layer}.weight"] @ first.detach().T
        torch.testing.assert_close(of_adapters[f"{layer}.lora_B.default.weight"], expected, rtol=1e-10, atol=1e-12)


def test_merged_weights_and_the_model_without_adapters_compute_what_they_should(build, rows):
    adapted, plain, merged = build(), build(None), build(None)
    for _ in range(3):
        adapted.update(rows, loss)
    with torch.no_grad():
        for name, weight in adapted.weights():
            merged.parameters[name].copy_(weight)
    found, expected = (engine.forward(rows)["log_probs"] for engine in (adapted, merged))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    base = plain.forward(rows)["log_probs"]
    assert not torch.allclose(found, base)
    with adapted.without_adapters():
        torch.testing.assert_close(adapted.forward(rows)["log_probs"], base, rtol=0, atol=1e-12)
    with pytest.raises(ModelError, match=r"no adapters, .* set lora\.rank"):
        plain.without_adapters()


def test_initial_values_depend_only_on_seed_and_layer(build):
    before = torch.random.get_rng_state()
    one, same, other = (build(seed=seed).parameters for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    name, elsewhere = (f"model.layers.{i}.mlp.up_proj.lora_A.default.weight" for i in (0, 1))
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name], one[elsewhere])
    assert one[name].abs().max() <= 32**-0.5


def test_adapters_of_bfloat16_weights_are_trained_in_float32(build, rows):
    engine = build(dtype="bfloat16")
    assert {p.dtype for p in engine.parameters.values()} == {torch.float32}
    assert engine.model.lm_head.weight.dtype == torch.bfloat16
    engine.update(rows, loss)
    assert {weight.dtype for _, weight in engine.weights()} == {torch.bfloat16}


def test_checkpoint_has_only_adapters_and_resumes_them(build, rows):
    engine, other = build(), build(seed=9)
    engine.update(rows, loss)
    state = engine.state_dict()
    assert state["lora"] == {"rank": 3, "alpha": 6.0, "targets": list(LoRAConfig().targets)}
    assert all(".lora_" in name for name in [*state["model"], *state["optimizer"]])
    other.load_state_dict(state)
    engine.update(rows, loss)
    other.update(rows, loss)
    assert all(torch.equal(p, other.parameters[name]) for name, p in engine.parameters.items())
    with pytest.raises(CheckpointError, match=r"trained with lora\.rank=3, not 2, lora\.alpha=6\.0, not 32\.0"):
        build({"rank": 2}).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"has only adapters; set lora\.rank = 3"):
        build(None).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"trained without adapters, but lora\.rank=3; use lora\.rank = 0"):
        build().load_state_dict(build(None).state_dict())
    with pytest.raises(CheckpointError, match=r"trained with lora\.alpha=6\.0, not 7\.0; use these values"):
        build({"rank": 3, "alpha": 7.0}).load_state_dict(state)


def test_tied_head_cannot_have_adapters(tiny_model):
    targets = LoRAConfig(rank=2, targets=("lm_head", "q_proj"))
    tied = load_causal_lm(tiny_model("llama", tie_word_embeddings=True))
    with pytest.raises(ModelError, match=r"lora\.targets: the weight of lm_head is tied to the input embedding"):
        add_adapters(tied, targets, torch.float32)
    add_adapters(load_causal_lm(tiny_model("llama")), targets, torch.float32)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 33}, r"lora\.rank=33 exceeds the smaller dimension of every layer .* use at most 32"),
        (
            {"rank": 2, "targets": ("q_proj", "nowhere")},
            r"lora\.targets: the model has no linear layer named nowhere; valid names: .*up_proj",
        ),
    ],
)
def test_adapters_that_fit_no_layer_are_an_error(build, lora, message):
    with pytest.raises(ModelError, match=message):
        build(lora)
    build({"rank": 32})  # although some layers are 32 x 16


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (LoRAConfig().targets, "gate_proj, up_proj, down_proj are the experts of glm4_moe models, on which adapters"),
        (("q_proj", "up_proj"), r"lora\.targets=\['q_proj', 'up_proj'\] is invalid: Cannot convert .*up_proj"),
        (("q_proj", "w1"), "the model has no linear layer named w1; valid names: down_proj, gate_proj, k_proj"),
    ],
)
def test_adapters_on_fused_experts_are_refused(tmp_path, targets, problem):
    model = load_causal_lm(write_family(tmp_path, "glm4_moe"))
    with pytest.raises(ModelError, match=problem):
        add_adapters(model, LoRAConfig(rank=2, targets=targets), torch.float32)
