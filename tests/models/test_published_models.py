"""Configurations of published models, built without weights: names, sizes, sharding, FLOPs and rotary scaling.

The configurations are the relevant keys of the models' published `config.json`, and the parameter counts those of
their cards.
"""

import json
import math

import pytest
import torch

from hybridflow.engines.sharding import layers_of
from hybridflow.errors import ModelConfigError
from hybridflow.models import (
    FusedForward,
    build_without_weights,
    decoder_shape,
    forward_flops,
    forward_of,
    require_tensor_parallel,
)
from hybridflow.models.tensor_parallel import placement_of

QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN3 |= {"head_dim": 128, "vocab_size": 151936, "num_key_value_heads": 8, "max_position_embeddings": 40960}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "rms_norm_eps": 1e-5}
LLAMA |= {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}


def sizes(layers: int, hidden: int, intermediate: int, *, tied: bool, heads: int = 0, kv_heads: int = 0) -> dict:
    found = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    found |= {"num_attention_heads": heads} if heads else {}
    return found | ({"num_key_value_heads": kv_heads} if kv_heads else {}) | {"tie_word_embeddings": tied}


MODELS = {
    # name: configuration, number of parameters, tensor parallel sizes that divide its heads
    "Qwen2.5-0.5B": (
        QWEN2 | {"vocab_size": 151936} | sizes(24, 896, 4864, heads=14, kv_heads=2, tied=True),
        494_032_768,
        (2,),
    ),
    "Qwen2.5-1.5B": (
        QWEN2 | {"vocab_size": 151936} | sizes(28, 1536, 8960, heads=12, kv_heads=2, tied=True),
        1_543_714_304,
        (2,),
    ),
    "Qwen2.5-7B": (
        QWEN2 | {"vocab_size": 152064} | sizes(28, 3584, 18944, heads=28, kv_heads=4, tied=False),
        7_615_616_512,
        (2, 4),
    ),
    "Qwen3-0.6B": (QWEN3 | sizes(28, 1024, 3072, heads=16, tied=True), 596_049_920, (2, 4, 8)),
    "Qwen3-4B": (QWEN3 | sizes(36, 2560, 9728, heads=32, tied=True), 4_022_468_096, (2, 4, 8)),
    "Qwen3-8B": (QWEN3 | sizes(36, 4096, 12288, heads=32, tied=False), 8_190_735_360, (2, 4, 8)),
    "Llama-3.2-1B": (
        LLAMA | sizes(16, 2048, 8192, tied=True) | {"head_dim": 64, "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}},
        1_235_814_400,
        (2, 4, 8),
    ),
    "Llama-3.1-8B": (
        LLAMA | sizes(32, 4096, 14336, tied=False) | {"rope_scaling": LLAMA3_ROPE | {"factor": 8.0}},
        8_030_261_248,
        (2, 4, 8),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def published(request, tmp_path_factory):
    """Return (directory, configuration, model on the meta device, parameters, tensor parallel sizes)."""
    config, count, tensor_sizes = MODELS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "config.json").write_text(json.dumps(config))
    return directory, config, build_without_weights(str(directory), "policy", torch.bfloat16), count, tensor_sizes


def test_the_number_of_parameters_is_the_published_one(published):
    _, _, model, count, _ = published
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_weights_have_the_names_of_the_published_files(published):
    _, config, model, _, _ = published
    names = {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in names) is not config["tie_word_embeddings"]
    of_layer = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
    of_layer |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"}
    wanted = {f"{module}.weight" for module in of_layer}
    wanted |= {f"self_attn.{x}_proj.bias" for x in "qkv"} if config["model_type"] == "qwen2" else set()
    wanted |= {f"self_attn.{x}_norm.weight" for x in "qk"} if config["model_type"] == "qwen3" else set()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == wanted


def test_each_layer_is_a_unit_of_sharding_and_has_the_fused_forward_pass(published):
    _, config, model, _, _ = published
    assert layers_of(model) == list(model.model.layers)
    assert len(model.model.layers) == config["num_hidden_layers"]
    assert isinstance(forward_of(model), FusedForward)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tensor_parallel_divides_the_heads_or_is_an_error(published, size):
    _, _, model, _, tensor_sizes = published
    if size not in tensor_sizes:
        with pytest.raises(ModelConfigError, match=rf"parallel\.tensor={size} does not divide num_.*heads="):
            require_tensor_parallel(model.config, size)
        return
    require_tensor_parallel(model.config, size)
    for name, parameter in model.named_parameters():
        placement = placement_of(name)
        if placement.is_shard():
            assert parameter.shape[placement.dim] % size == 0, name


def test_flops_are_those_counted_by_hand(published):
    directory, config, _, count, _ = published
    shape = decoder_shape(directory)
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    # Norms, biases, and embeddings that only look up rows, do not count.
    norms = (2 * layers + 1) * hidden + (2 * layers * head_dim if config["model_type"] == "qwen3" else 0)
    width = head_dim * (config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    biases = layers * width if config["model_type"] == "qwen2" else 0
    weights = count - norms - biases - (0 if config["tie_word_embeddings"] else vocabulary * hidden)
    attention = 4 * layers * config["num_attention_heads"] * head_dim  # scores and their products with the values
    length = 4096
    by_hand = 2 * weights * length + attention * length * (length + 1) / 2
    assert forward_flops(shape, [length]) == pytest.approx(by_hand, rel=1e-12)


def test_llama3_scaling_lowers_the_slow_frequencies_only(published):
    """Equations of the reference implementation of Llama 3.1."""
    _, config, model, _, _ = published
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    found = build_rotary(model)
    scaling = config.get("rope_scaling")
    for index, frequency in enumerate(found.tolist()):
        plain = config["rope_theta"] ** (-2 * index / head_dim)
        if scaling:
            old, wavelength = scaling["original_max_position_embeddings"], 2 * math.pi / plain
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = min(max((old / wavelength - low) / (high - low), 0.0), 1.0)
            plain = (1 - smooth) * plain / scaling["factor"] + smooth * plain
        assert frequency == pytest.approx(plain, rel=1e-5), index


def build_rotary(model):
    """Return the inverse frequencies, which are computed from the configuration on the CPU."""
    return type(model.model.rotary_emb)(model.config).inv_freq
