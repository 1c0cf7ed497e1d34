"""Models built on the meta device and filled from files, without shards; `tests/engines` tests shards."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.errors import ModelError
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.sharded_loading import StoredModel, build_with_placeholders, build_without_weights, load_shards


def load(path, head="policy", dtype=torch.float32):
    model = build_without_weights(path, head, dtype)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(parameter, device="cpu")))
    model.tie_weights()
    load_shards(model, path)
    return model


@pytest.fixture
def copy_of(tiny_model, tmp_path):
    def copy(**config):
        return shutil.copytree(tiny_model("qwen2", **config), tmp_path / "model")

    return copy


def in_several_files(path):
    """Rewrite the weights as several files with their index."""
    load_causal_lm(path).save_pretrained(path, max_shard_size="20KB")
    (path / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_weights_equal_those_loaded_by_transformers(tiny_model, family, tied):
    path = tiny_model(family, tie_word_embeddings=tied)
    ours, theirs = load(path), load_causal_lm(path)
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied


def test_missing_value_head_is_zero_and_dtype_is_cast(tiny_model):
    model = load(tiny_model("qwen2"), "value", torch.float64)
    assert not model.score.weight.any()
    assert model.dtype == torch.float64


def test_indexed_files_and_body_without_prefix_are_read(copy_of):
    path = copy_of()
    weights = load_file(path / "model.safetensors")
    in_several_files(path)
    found = [load(path)]
    (path / "model.safetensors.index.json").unlink()
    body = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(body, path / "model.safetensors", metadata={"format": "pt"})
    found.append(load(path))
    assert all(torch.equal(model.get_parameter(name), weight) for model in found for name, weight in weights.items())


def test_files_that_are_not_those_of_the_index_are_an_error(copy_of):
    path = copy_of()
    in_several_files(path)
    missing = sorted(path.glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ModelError, match=f"(?s)cannot be read.*{missing.name}"):
        load(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match=r"lists '\.\./elsewhere\.safetensors', which is not a file of the directory"):
        StoredModel(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 50}, r"mlp\.\w+_proj\.weight has shape .* by config\.json"),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            r"the weights lack model\.layers\.2\..* which config\.json requires",
        ),
    ],
)
def test_weights_of_another_model_are_named_in_error(copy_of, changes, message):
    path = copy_of()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        load(path)


def test_model_of_placeholders_has_shapes_without_memory(tiny_model):
    path = tiny_model("qwen2", tie_word_embeddings=True)
    model = build_with_placeholders(path, "policy", torch.bfloat16, torch.device("cpu"))
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) < 200
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (40, 32)
