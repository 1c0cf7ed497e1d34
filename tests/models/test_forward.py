import pytest
import torch

from hybridflow.kernels import use_kernels
from hybridflow.models import PackedPlan, PaddedPlan, forward_of, load_causal_lm, load_value_model
from hybridflow.models.forward import FusedForward, OwnForward
from hybridflow.models.kv_cache import DecodePlan, KVCache, PrefillPlan

LENGTHS = [5, 9, 9, 2]
VARIANTS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_fused_pass_equals_the_models_own(variant, kernels, tiny_model):
    family, config = VARIANTS[variant]
    model = load_causal_lm(tiny_model(family, **config))
    assert isinstance(forward_of(model), FusedForward)
    inputs = packed_input()
    fused = logits_and_gradients(forward_of(model), model, inputs)
    own = logits_and_gradients(OwnForward(model), model, inputs)
    for name, value in own.items():
        assert error(fused[name], value) < 2e-5, name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_in_bfloat16_the_fused_pass_is_as_close_to_float32_as_the_models_own(family, kernels, tiny_model):
    exact_model, model = (load_causal_lm(tiny_model(family), dtype) for dtype in (torch.float32, torch.bfloat16))
    inputs = packed_input()
    exact = logits_and_gradients(OwnForward(exact_model), exact_model, inputs)
    fused = logits_and_gradients(forward_of(model), model, inputs)
    own = logits_and_gradients(OwnForward(model), model, inputs)
    for name, value in exact.items():
        assert error(fused[name], value) < max(1.5 * error(own[name], value), 0.01), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_critic_has_its_values_from_the_fused_pass(family, kernels, tiny_model):
    model = load_value_model(tiny_model(family))
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    inputs = packed_input()
    torch.testing.assert_close(forward_of(model)(**inputs), OwnForward(model)(**inputs))


@pytest.mark.parametrize("of", [FusedForward, OwnForward])
def test_the_head_is_computed_for_the_tokens_asked_for(of, tiny_model):
    keep = torch.tensor([3, 0, 11])
    for model in (load_causal_lm(tiny_model()), load_value_model(tiny_model())):
        every = of(model)(**packed_input())
        torch.testing.assert_close(of(model)(**packed_input(), logits_to_keep=keep), every[:, keep])


def test_padded_rows_share_one_call(tiny_model):
    model = load_causal_lm(tiny_model())
    tokens = torch.randint(40, (3, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "position_ids": torch.arange(6).expand(3, 6), "attention_plan": PaddedPlan()}
    fused = forward_of(model)(**inputs)
    assert fused.shape == (3, 6, 40)
    torch.testing.assert_close(fused, OwnForward(model)(**inputs))


def test_another_activation_is_left_to_the_models_own_pass(tiny_model):
    model = load_causal_lm(tiny_model(hidden_act="gelu"))
    assert isinstance(forward_of(model), OwnForward)


def test_angles_grow_with_the_positions_asked_for(tiny_model):
    model = load_causal_lm(tiny_model())
    forward = forward_of(model)
    for start in (0, 3, 40):
        positions = torch.arange(start, start + 4)[None]
        inputs = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "position_ids": positions}
        inputs["attention_plan"] = PackedPlan.from_lengths([4])
        torch.testing.assert_close(forward(**inputs), OwnForward(model)(**inputs))


def decoded(forward, steps=3):
    """Logits of the last of LENGTHS, then of a few tokens after each."""
    cache, plan = KVCache(torch.device("cpu")), PrefillPlan(LENGTHS)
    logits = [forward(**{**packed_input(), "attention_plan": plan}, logits_to_keep=torch.tensor(LENGTHS).cumsum(0) - 1)]
    cache.append(plan, torch.arange(len(LENGTHS)), max(LENGTHS) + steps)
    for step in range(steps):
        logits.append(forward.decode(torch.tensor([3, 1, 39, 7]) - step % 2, DecodePlan(cache, 4))[None])
        cache.lengths += 1
    return torch.cat(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_compiled_decoder_gives_the_logits_of_the_models_own_pass(variant, dtype, tiny_model):
    family, config = VARIANTS[variant]
    exact_model, model = (load_causal_lm(tiny_model(family, **config), d) for d in (torch.float64, dtype))
    forward = forward_of(model)
    with torch.no_grad():
        exact = decoded(OwnForward(exact_model))
        uncompiled = error(decoded(forward), exact)
        forward.pack_weights()
        assert error(decoded(forward), exact) < max(1.5 * uncompiled, 2e-6)


def test_the_copy_is_read_until_it_is_dropped(tiny_model):
    model = load_causal_lm(tiny_model())
    forward = forward_of(model)
    with torch.no_grad():
        forward.pack_weights()
        model.lm_head.weight.zero_()
        assert decoded(forward)[1:].any()
        forward.drop_packed_weights()
        assert not decoded(forward)[1:].any()


def test_a_row_decodes_to_the_same_bits_whatever_its_neighbours(tiny_model):
    forward = forward_of(load_causal_lm(tiny_model("qwen3")))
    tokens = torch.arange(1, 31)
    with torch.no_grad():
        forward.pack_weights()
        cache, plan = KVCache(torch.device("cpu")), PrefillPlan([30])
        inputs = {"input_ids": tokens[None], "position_ids": torch.arange(30)[None], "attention_plan": plan}
        forward(**inputs)
        cache.append(plan, torch.zeros(30, dtype=torch.int64), 31)
        every = forward.decode(tokens, DecodePlan(cache, 30))
        for count in (1, 7, 13):
            assert torch.equal(forward.decode(tokens[:count], DecodePlan(cache, count)), every[:count])


def test_gradients_are_of_the_models_own_weights_while_a_copy_is_there(tiny_model):
    model = load_causal_lm(tiny_model())
    forward = forward_of(model)
    expected = logits_and_gradients(forward, model, packed_input())
    forward.pack_weights()
    for name, value in logits_and_gradients(forward, model, packed_input()).items():
        assert torch.equal(value, expected[name]), name


def test_a_layer_that_is_more_than_a_product_is_called_and_never_copied(tiny_model):
    model = load_causal_lm(tiny_model())

    class Adapter(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    plain = model.model.layers[0].self_attn.o_proj
    adapter = Adapter(plain.in_features, plain.out_features, bias=False)
    adapter.weight = plain.weight
    model.model.layers[0].self_attn.o_proj = adapter
    forward = forward_of(model)
    with torch.no_grad():
        forward.pack_weights()
        torch.testing.assert_close(decoded(forward), decoded(OwnForward(model)))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_length_are_left_to_the_models_own_pass(kind, tiny_model):
    model = load_causal_lm(tiny_model())
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": kind}
    assert isinstance(forward_of(model), OwnForward)


def test_an_embedding_that_is_more_than_a_lookup_is_called_and_never_copied(tiny_model):
    model = load_causal_lm(tiny_model())

    class Scaled(torch.nn.Embedding):
        def forward(self, x):
            return 2 * super().forward(x)

    scaled = Scaled(*model.model.embed_tokens.weight.shape)
    scaled.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = scaled
    forward = forward_of(model)
    with torch.no_grad():
        forward.pack_weights()
        torch.testing.assert_close(decoded(forward), decoded(OwnForward(model)))
