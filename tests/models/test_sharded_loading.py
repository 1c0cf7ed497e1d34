"""Models built on the meta device and filled from files, without shards; `tests/engines` tests shards."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.families import write_family
from hybridflow.errors import ModelError
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.parameters import persistent_buffers
from hybridflow.models.sharded_loading import build_with_placeholders, build_without_weights, load_shards
from hybridflow.models.stored_model import StoredModel


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


@pytest.mark.parametrize("kind", ["glm4_moe", "mixtral", "gpt2"])
@pytest.mark.parametrize("as_published", [True, False])
def test_experts_and_buffers_equal_those_loaded_by_transformers(tmp_path, kind, as_published):
    write_family(tmp_path, kind, save_original_format=as_published)
    ours, theirs = load(tmp_path).state_dict(), load_causal_lm(tmp_path).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())


def test_generation_has_the_buffers_of_the_directory_in_their_dtype(tmp_path):
    write_family(tmp_path, "glm4_moe")
    wanted = persistent_buffers(load_causal_lm(tmp_path, torch.bfloat16))
    found = persistent_buffers(build_with_placeholders(tmp_path, "policy", torch.bfloat16, torch.device("cpu")))
    assert found.keys() == wanted.keys() == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert all(torch.equal(found[name], buffer) for name, buffer in wanted.items())
    assert {buffer.dtype for buffer in found.values()} == {torch.float32}


def test_an_expert_that_is_missing_is_an_error_that_names_the_fused_weight(tmp_path):
    file = write_family(tmp_path, "mixtral") / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"experts\.0\.w1.*other weights do not fit together as .*gate_up_proj"):
        load(tmp_path)
    with pytest.raises(ModelError, match="such as the experts of a layer, are missing or of different shapes"):
        load_causal_lm(tmp_path)
