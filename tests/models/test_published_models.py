"""Configurations of published models, built without weights: names, sizes and sharding."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fixtures.published_models import MODELS
from hybridflow.engines.sharding import units_of
from hybridflow.errors import ModelConfigError
from hybridflow.models.forward_of import forward_of
from hybridflow.models.fused_forward import FusedForward
from hybridflow.models.loading import build_without_weights
from hybridflow.models.tensor_parallel import distribute_parameters, placement_of, require_tensor_parallel

IN_CI = ("Qwen2.5-7B", "Llama-3.2-1B")


@pytest.fixture(
    scope="module",
    params=[name if name in IN_CI else pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS],
)
def published(request, tmp_path_factory):
    """Return (directory, configuration, model on the meta device, parameters, tensor parallel sizes)."""
    config, count, tensor_sizes = MODELS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "config.json").write_text(json.dumps(config))
    return directory, config, build_without_weights(str(directory), "policy", torch.bfloat16), count, tensor_sizes


def test_parameters_have_the_published_number_names_and_shapes(published):
    _, config, model, count, _ = published
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert ("lm_head.weight" in dict(model.named_parameters())) is not config["tie_word_embeddings"]
    heads, kv_heads, hidden = (config[f"{x}"] for x in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    head_dim = config.get("head_dim", hidden // heads)
    queries, keys, wide = heads * head_dim, kv_heads * head_dim, config["intermediate_size"]
    wanted = {"self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries)}
    wanted |= {f"self_attn.{x}_proj": (keys, hidden) for x in "kv"}
    wanted |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
    wanted |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    wanted |= {f"self_attn.{x}_norm": (head_dim,) for x in "qk"} if config["model_type"] == "qwen3" else {}
    shapes = {f"{name}.weight": shape for name, shape in wanted.items()}
    if config["model_type"] == "qwen2":
        shapes |= {f"self_attn.{x}_proj.bias": (rows,) for x, rows in (("q", queries), ("k", keys), ("v", keys))}
    assert len(model.model.layers) == config["num_hidden_layers"]
    for layer in model.model.layers:
        assert {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()} == shapes
        assert layer.self_attn.num_key_value_groups == heads // kv_heads > 1


def test_each_layer_is_a_unit_of_sharding_and_has_the_fused_forward_pass(published):
    _, _, model, _, _ = published
    assert [unit for unit in units_of(model) if unit in [*model.model.layers]] == list(model.model.layers)
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
