"""Configurations of published models, built without weights: names, sizes, sharding, FLOPs and rotary scaling."""

import copy
import json
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fixtures.published_models import MODELS
from hybridflow.engines.sharding import layers_of
from hybridflow.errors import ModelConfigError
from hybridflow.models import (
    FusedForward,
    build_without_weights,
    decoder_shape,
    distribute_parameters,
    forward_flops,
    forward_of,
    require_tensor_parallel,
)
from hybridflow.models.tensor_parallel import placement_of


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


def test_queries_are_grouped_as_published(published):
    _, config, model, _, _ = published
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    queries, keys, hidden = heads * head_dim, kv_heads * head_dim, config["hidden_size"]
    assert heads % kv_heads == 0
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (heads, kv_heads)
    for layer in model.model.layers:
        attention = layer.self_attn
        assert attention.num_key_value_groups == heads // kv_heads > 1
        shapes = [tuple(getattr(attention, f"{x}_proj").weight.shape) for x in "qkvo"]
        assert shapes == [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
        if config["model_type"] == "qwen2":
            assert [len(getattr(attention, f"{x}_proj").bias) for x in "qkv"] == [queries, keys, keys]


def test_each_layer_is_a_unit_of_sharding_and_has_the_fused_forward_pass(published):
    _, config, model, _, _ = published
    assert layers_of(model) == list(model.model.layers)
    assert len(model.model.layers) == config["num_hidden_layers"]
    assert isinstance(forward_of(model), FusedForward)


@pytest.fixture
def mesh_of():
    """Return `mesh_of(size)`, which makes this process rank 0 of a tensor parallel mesh that communicates nothing."""

    def build(size):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        return init_device_mesh("cpu", (size,))

    yield build
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tensor_parallel_shards_the_heads_or_is_an_error(published, size, mesh_of):
    _, config, model, _, tensor_sizes = published
    if size not in tensor_sizes:
        with pytest.raises(ModelConfigError, match=rf"parallel\.tensor={size} does not divide num_.*heads="):
            require_tensor_parallel(model.config, size)
        return
    require_tensor_parallel(model.config, size)
    sharded = copy.deepcopy(model)
    distribute_parameters(sharded, mesh_of(size))
    assert (sharded.lm_head.weight is sharded.model.embed_tokens.weight) is config["tie_word_embeddings"]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    key_rows = config["num_key_value_heads"] // size * head_dim
    assert sharded.model.layers[0].self_attn.k_proj.weight.to_local().shape == (key_rows, config["hidden_size"])
    whole = dict(model.named_parameters())
    for name, parameter in sharded.named_parameters():
        placement, shape = placement_of(name), list(whole[name].shape)
        if placement.is_shard():
            assert shape[placement.dim] % size == 0, name
            shape[placement.dim] //= size
        assert parameter.device.type == "meta"
        assert parameter.shape == whole[name].shape
        assert list(parameter.to_local().shape) == shape, name


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
