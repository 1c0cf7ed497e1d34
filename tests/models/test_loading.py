import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from fixtures.families import write_family
from hybridflow.errors import ModelError
from hybridflow.models.attention import PackedPlan
from hybridflow.models.loading import build_with_placeholders, load_causal_lm, load_value_model
from hybridflow.models.parameters import persistent_buffers
from hybridflow.models.stored_model import StoredModel


@pytest.fixture
def directory(tiny_model, tmp_path) -> Path:
    """Make a copy of a model directory, which a test may damage."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def edit_config(directory: Path, **changes) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(directory: Path, drop: str = "", **changes) -> None:
    weights = load_file(directory / "model.safetensors") | changes
    weights.pop(drop, None)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def in_several_files(directory: Path) -> None:
    """Rewrite the weights as several files with their index."""
    load_causal_lm(directory).save_pretrained(directory, max_shard_size="20KB")
    (directory / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_weights_equal_those_loaded_by_transformers(tiny_model, family, tied):
    path = tiny_model(family, tie_word_embeddings=tied)
    ours, theirs = load_causal_lm(path), AutoModelForCausalLM.from_pretrained(path)
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied


def test_indexed_files_and_body_without_prefix_are_read(directory):
    weights = load_file(directory / "model.safetensors")
    in_several_files(directory)
    found = [load_causal_lm(directory)]
    (directory / "model.safetensors.index.json").unlink()
    body = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(body, directory / "model.safetensors", metadata={"format": "pt"})
    found.append(load_causal_lm(directory))
    assert all(torch.equal(model.get_parameter(name), weight) for model in found for name, weight in weights.items())


def test_files_that_are_not_those_of_the_index_are_an_error(directory):
    in_several_files(directory)
    missing = sorted(directory.glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ModelError, match=f"(?s)cannot be read.*{missing.name}"):
        load_value_model(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match=r"lists '\.\./elsewhere\.safetensors', which is not a file of the directory"):
        StoredModel(directory)


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False)])
def test_packed_logits_equal_eager_attention(tiny_model, family, tied):
    path = tiny_model(family, tie_word_embeddings=tied)
    model = load_causal_lm(path)
    eager = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    sequences = [torch.arange(3, 3 + length) for length in (5, 1, 4)]
    with torch.no_grad():
        logits = model(
            torch.cat(sequences)[None],
            position_ids=torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None],
            attention_plan=PackedPlan.from_lengths([5, 1, 4]),
        ).logits[0]
        expected = torch.cat([eager(sequence[None]).logits[0] for sequence in sequences])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_have_dtype_and_rotary_frequencies_stay_float32(tiny_model, dtype):
    for model in (load_causal_lm(tiny_model(), dtype), load_value_model(tiny_model(), dtype)):
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_dropout_is_off_in_training_mode(tmp_path):
    config = transformers.OPTConfig(
        vocab_size=40, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16,
        max_position_embeddings=64, dropout=0.5, attention_dropout=0.5, layerdrop=0.5, pad_token_id=0,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path)
    tokens, positions = torch.tensor([[3, 4, 5]]), torch.tensor([[0, 1, 2]])

    def logits():
        return model(tokens, position_ids=positions, attention_plan=PackedPlan.from_lengths([3])).logits

    expected = logits()
    model.train()
    assert torch.equal(logits(), expected)


def test_new_value_head_is_zero(tiny_model):
    model = load_value_model(tiny_model("qwen2"))
    assert model.score.weight.shape == (1, 32)
    assert not model.score.weight.any()
    assert not model.score.bias.any()


def test_stored_value_head_is_loaded(tiny_model, tmp_path):
    model = load_value_model(tiny_model("qwen2"))
    with torch.no_grad():
        model.score.weight.fill_(0.5)
    model.save_pretrained(tmp_path)
    assert (load_value_model(tmp_path).score.weight == 0.5).all()


def test_critic_loads_reward_model_head_without_bias(tiny_model, tmp_path):
    config = transformers.LlamaConfig.from_pretrained(tiny_model("llama"), num_labels=1)
    stored = transformers.LlamaForSequenceClassification(config)
    stored.save_pretrained(tmp_path)
    model = load_value_model(tmp_path)
    assert torch.equal(model.score.weight, stored.score.weight)
    assert not model.score.bias.any()


def test_loading_keeps_log_settings_of_transformers(tiny_model):
    verbosity, progress = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_info()  # no other test leaves this one behind
    try:
        load_value_model(tiny_model())
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
        assert transformers_logging.is_progress_bar_enabled() == progress
    finally:
        transformers_logging.set_verbosity(verbosity)


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "config.json not found; give a Hugging Face directory"),
        (lambda path: (path / "config.json").unlink(), "config.json not found"),
        (lambda path: (path / "config.json").write_text('{"model_type":'), "not a valid JSON file. The directory must"),
        (lambda path: (path / "config.json").write_text("{}"), "should have a `model_type` key"),
        (lambda path: edit_config(path, hidden_size="wide"), "'hidden_size' expected int, got str"),
        (lambda path: edit_config(path, num_attention_heads=6), r"\(32\) is not a multiple .* heads \(6\)"),
        (lambda path: (path / "model.safetensors").unlink(), "no file named model.safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "deserializing header.* The directory must hold"),
        (
            lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:9000]),
            "incomplete metadata.* The directory must hold",
        ),
        (
            lambda path: edit_config(path, intermediate_size=64),
            r"has shape \(.*48.*\) in the weights, but \(.*64.*\) by",
        ),
        (lambda path: edit_config(path, num_hidden_layers=3), r"lack model.layers.2.* and 6 more, .* copy them again"),
        (lambda path: edit_weights(path, drop="model.norm.weight"), "the weights lack model.norm.weight, which"),
    ],
)
def test_damaged_directory_error_names_a_fix(directory, load, damage, message):
    damage(directory)
    with pytest.raises(ModelError, match="(?is)" + message) as error:
        load(directory)
    assert str(directory) in str(error.value)


def test_critic_cannot_be_loaded_as_policy(tiny_model, tmp_path):
    load_value_model(tiny_model("llama")).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is a LlamaForTokenClassification \(a classifier or reward model\)"):
        load_causal_lm(tmp_path)


def test_unused_weights_outside_the_layers_are_logged(directory, caplog):
    weights = load_file(directory / "model.safetensors")
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.weight")
    save_file(weights | {name: torch.ones(4) for name in names}, directory / "model.safetensors", {"format": "pt"})
    load_causal_lm(directory)
    assert "has weights that are not part of its config.json's model: mtp.weight\n" in caplog.text


def test_unused_weights_of_a_layer_are_an_error(directory):
    edit_config(directory, num_hidden_layers=1)
    with pytest.raises(
        ModelError, match=r"the weights have model\.layers\.1\.input_layernorm\.weight, .* and 6 more, wh"
    ):
        load_causal_lm(directory)


def test_code_in_directory_is_not_executed(directory):
    (directory / "evil.py").write_text(f"open('{directory / 'was_run'}', 'w')\nclass Model: pass\nclass Config: pass\n")
    edit_config(
        directory, model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    )
    with pytest.raises(ModelError, match="unknown to the installed transformers"):
        load_causal_lm(directory)
    assert not (directory / "was_run").exists()


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
    ours, theirs = (load(tmp_path).state_dict() for load in (load_causal_lm, AutoModelForCausalLM.from_pretrained))
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
        load_causal_lm(tmp_path)
