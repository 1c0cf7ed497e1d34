import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.utils import logging as transformers_logging

from fixtures.families import small_config, write_family, write_with_images
from hybridflow.checkpoint import CheckpointStore, export_model, save_state
from hybridflow.checkpoint.model_fingerprint import model_fingerprint
from hybridflow.errors import CheckpointError, ModelError
from hybridflow.models.loading import load_causal_lm

transformers_logging.disable_progress_bar()

TOKENS = torch.tensor([[1, 5, 9, 2, 7]])
SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0),
}


def make_model(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def make_model_directory(directory: Path, config: Any) -> Path:
    """Make the directory that training starts from: other weights, a tokenizer, a generation configuration."""
    make_model(config, seed=1).save_pretrained(directory)
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "one": 2, "two": 3}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], "pad_token_id": 0}))
    (directory / "modeling_evil.py").write_text("raise SystemExit('code of the model directory was executed')")
    return directory


def write_dtype(model_dir: Path, dtype: str | None) -> None:
    file = model_dir / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "dtype"}
    file.write_text(json.dumps(config | ({"dtype": dtype} if dtype else {})))


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture
def llama(tmp_path):
    return make_model_directory(tmp_path / "model", CONFIGS["llama"]), weights_of(make_model(CONFIGS["llama"], seed=2))


@pytest.mark.parametrize("family", CONFIGS)
def test_exported_checkpoint_loads_as_trained_model(tmp_path, family):
    model_dir = make_model_directory(tmp_path / "base-model", CONFIGS[family])
    trained = make_model(CONFIGS[family], seed=2)
    info = {
        "kind": "train",
        "config": {"trainer.seed": 7, "algorithm.advantage": "grpo", "trainer.run_dir": "/home/someone"},
        "models": {"model.path": "abc123"},
    }
    with CheckpointStore(tmp_path / "checkpoints").begin(3, info=info) as directory:
        save_state({"model": weights_of(trained), "optimizer": {"step": torch.tensor(3.0)}}, directory / "actor")
    export_model(tmp_path / "checkpoints" / "step_000003", model_dir, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.dtype == torch.float32
    assert torch.equal(logits_of(loaded), logits_of(trained))
    assert loaded.generation_config.eos_token_id == [1, 3]
    tokenizer, original = (AutoTokenizer.from_pretrained(directory) for directory in (tmp_path / "out", model_dir))
    assert type(tokenizer) is type(original)
    assert tokenizer("one two").input_ids == original("one two").input_ids
    assert tokenizer.get_vocab() == original.get_vocab()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "two"}], tokenize=False) == "two"
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix in (".py", ".bin")]
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n")
    for words in ("after step 3 of reinforcement learning", "| `trainer.seed` | `7` |", "abc123"):
        assert words in card
    assert str(tmp_path) not in card
    assert "someone" not in card


@pytest.mark.parametrize(
    ("stated", "chosen", "stored"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", None, "bfloat16"),
        ("float32", None, "float32"),
        (None, None, "float32"),
    ],
)
def test_weights_are_stored_in_the_chosen_dtype_or_that_of_config_json(tmp_path, stated, chosen, stored):
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    model_dir, trained = make_model_directory(tmp_path / "model", config), make_model(config, seed=2)
    write_dtype(model_dir, stated)
    weights = trained.state_dict() if chosen is None else weights_of(trained)  # with or without tied names
    before = {name: weight.clone() for name, weight in weights.items()}
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    assert export_model(weights, model_dir, tmp_path / "out", dtype=chosen) == stored
    assert torch.rand(3).tolist() == expected
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == stored
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{stored}"}
    assert "lm_head.weight" not in tensors
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for name, weight in weights_of(trained).items():
        assert torch.equal(loaded.get_parameter(name), weight.to(getattr(torch, stored)))
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("as_published", [True, False])
def test_experts_leave_as_they_came_in_several_files(tmp_path, monkeypatch, as_published):
    monkeypatch.setattr("hybridflow.checkpoint.export.MAX_FILE_BYTES", 10_000)
    model_dir = write_family(tmp_path / "model", "glm4_moe", save_original_format=as_published)
    came = load_file(model_dir / "model.safetensors")
    export_model(weights_of(AutoModelForCausalLM.from_pretrained(model_dir)), model_dir, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    left = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert left.keys() == came.keys()
    assert all(torch.equal(left[name], tensor) for name, tensor in came.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == came.keys()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    export_model(weights_of(make_model(small_config("glm4_moe"))), model_dir, tmp_path / "half", dtype="bfloat16")
    written = [load_file(file).get(bias) for file in sorted((tmp_path / "half").glob("*.safetensors"))]
    assert any(tensor is not None and torch.equal(tensor, came[bias]) for tensor in written)


@pytest.mark.parametrize(("kind", "text"), [("gemma3", "gemma3_text"), ("qwen3_5", "qwen3_5_text")])
def test_weights_of_other_parts_leave_as_they_came(tmp_path, monkeypatch, kind, text):
    came = write_with_images(tmp_path / "came", kind, text)
    monkeypatch.setattr("hybridflow.checkpoint.export.MAX_FILE_BYTES", 20_000)
    trained = {name: weight + 0.5 * ("vis" not in name) for name, weight in load_causal_lm(came).named_parameters()}
    export_model(trained, came, tmp_path / "left")
    before = AutoModelForImageTextToText.from_pretrained(came).state_dict()
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "left", output_loading_info=True)
    assert not any(info.values())
    after = model.state_dict()
    same = {name for name, weight in before.items() if torch.equal(weight, after[name])}
    assert len(same) > 10
    assert same == {name for name in before if "vis" in name}
    architectures = [json.loads((each / "config.json").read_text())["architectures"] for each in tmp_path.iterdir()]
    assert architectures[0] == architectures[1]


def test_files_of_a_body_with_masks_leave_with_their_names(tmp_path):
    model_dir = make_model_directory(tmp_path / "base", CONFIGS["gpt2"])
    published = {n.removeprefix("transformer."): w for n, w in load_file(model_dir / "model.safetensors").items()}
    mask = {"h.0.attn.bias": torch.ones(1, 1, 32, 32).tril().bool(), "h.0.attn.masked_bias": torch.tensor(-1e9)}
    save_file(published | mask, model_dir / "model.safetensors", metadata={"format": "pt"})
    export_model(weights_of(load_causal_lm(model_dir)), model_dir, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == published.keys()
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model_dir, tmp_path / "out"))
    assert torch.equal(logits_of(before), logits_of(after))


def test_configuration_keeps_the_words_of_its_version_of_transformers(llama, tmp_path):
    model_dir, weights = llama
    old = {"torch_dtype": "bfloat16", "rope_theta": 5000.0, "rope_scaling": None, "auto_map": {"AutoModel": "evil.M"}}
    config = json.loads((model_dir / "config.json").read_text()) | old
    config = {key: value for key, value in config.items() if key not in ("dtype", "rope_parameters")}
    (model_dir / "config.json").write_text(json.dumps(config))
    export_model(weights, model_dir, tmp_path / "out", dtype="float32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {key: value for key, value in config.items() if key != "auto_map"} | {"torch_dtype": "float32"}


def test_every_file_that_a_tokenizer_reads_is_copied(llama, tmp_path):
    model_dir, weights = llama
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(model_dir)
    names = ("spiece.model", "vocab.txt", "dict.txt", "tekken.json", "preprocessor_config.json", "source.spm")
    for name in names:
        (model_dir / name).write_text(name)
    export_model(weights, model_dir, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert [(tmp_path / "out" / name).read_text() for name in names] == list(names)


@pytest.mark.parametrize("pads", ["<eos>", "<pad>", None])
def test_reader_of_a_reward_model_scores_what_was_scored_in_training(tmp_path, pads):
    from transformers import AutoModelForSequenceClassification

    from hybridflow.config import MemoryConfig, ModelConfig
    from hybridflow.data.preference_dataset import collate_conversations
    from hybridflow.engines import TorchEngine

    model_dir = make_model_directory(tmp_path / "model", CONFIGS["llama"])
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.pad_token = pads
    tokenizer.add_special_tokens({"bos_token": "one"})
    tokenizer.save_pretrained(model_dir)
    engine = TorchEngine(str(model_dir), "value", model=ModelConfig(path=str(model_dir)), memory=MemoryConfig())
    with torch.no_grad():
        engine.parameters["score.weight"].normal_()
    weights = {name: weight.detach() for name, weight in engine.parameters.items()}
    with CheckpointStore(tmp_path / "checkpoints").begin(3, info={"kind": "reward-model"}) as directory:
        save_state({"model": weights}, directory / "reward_model")
    export_model(tmp_path / "checkpoints" / "step_000003", model_dir, tmp_path / "out")
    conversations = [[5, 9, 3, 7, 11, 1], [4, 6, 1, 1], [8, 12, 13, 15, 6, 3, 2, 1]]  # ending with EOS, perhaps twice
    values = engine.forward(collate_conversations(conversations))["values"][:, 0]
    reader = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert (reader.config.num_labels, reader.config.architectures) == (1, ["LlamaForSequenceClassification"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token_id == reader.config.pad_token_id == (0 if pads == "<pad>" else 2)
    with torch.no_grad():
        scores = reader(**tokenizer.pad({"input_ids": conversations}, return_tensors="pt")).logits[:, 0]
    offset = weights.get("score.bias", 0.0)
    torch.testing.assert_close(scores + offset, values, rtol=0, atol=1e-5)


def test_large_model_is_written_as_several_files_with_index(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridflow.checkpoint.export.MAX_FILE_BYTES", 1000)
    model_dir = make_model_directory(tmp_path / "model", CONFIGS["qwen2, tied"])
    trained = make_model(CONFIGS["qwen2, tied"], seed=2)
    export_model(weights_of(trained), model_dir, tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights_of(trained).values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits_of(loaded), logits_of(trained))


def test_export_to_existing_directory_requires_it_to_be_empty(llama, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / ".tmp-out-0123456789abcdef").mkdir()  # left by a killed export
    export_model(llama[1], llama[0], out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    files = sorted(path.name for path in out.iterdir())
    with pytest.raises(CheckpointError, match="out' exists and is not an empty directory; give a new directory"):
        export_model(llama[1], llama[0], out)
    with pytest.raises(CheckpointError, match=r"config\.json' exists and is not an empty directory"):
        export_model(llama[1], llama[0], out / "config.json")
    assert sorted(path.name for path in out.iterdir()) == files


@pytest.mark.parametrize(
    ("changes", "stated", "message"),
    [
        (
            {"model.norm.weight": None, "score.weight": torch.zeros(1, 8), "lm_head.weight": torch.zeros(17, 8)},
            "float32",
            r"do not fit the LlamaForCausalLM .*1 missing \(model\.norm\.weight\); 1 unknown \(score\.weight\); "
            r"1 of another shape \(lm_head\.weight \(17, 8\) instead of \(16, 8\)\)",
        ),
        (
            {"model.norm.weight": torch.full((8,), 1e6)},
            "float16",
            r"model.norm.weight has values up to 1e.06, but float16 ends at 65504; use --dtype",
        ),
        (
            {"lm_head.weight": torch.zeros(16, 8, dtype=torch.int32)},
            "float32",
            r"'lm_head\.weight' .* is stored as torch.int32, but training saves floats",
        ),
    ],
)
def test_weights_that_cannot_be_exported_are_an_error(llama, tmp_path, changes, stated, message):
    model_dir, weights = llama
    write_dtype(model_dir, stated)
    weights = {name: weight for name, weight in (weights | changes).items() if weight is not None}
    with CheckpointStore(tmp_path / "checkpoints").begin(3) as directory:
        save_state({"model": weights}, directory / "actor")
    with pytest.raises(CheckpointError, match=message):
        export_model(tmp_path / "checkpoints" / "step_000003", model_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"is not a model directory: config\.json not found"),
        ("{", "cannot be loaded as a CausalLM model: It looks like the config file"),
        ('{"model_type": "unheard_of"}', "model_type='unheard_of' is unknown to the installed transformers"),
        ('{"auto_map": {"AutoConfig": "modeling_evil.Config"}, "model_type": "evil"}', "model_type='evil' is unknown"),
        ('{"model_type": "vit"}', "transformers has no CausalLM model of vit; use a model with causal attention"),
    ],
)
def test_directory_without_causal_model_is_an_error(tmp_path, config, message):
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('code of the model directory was executed')")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=message):
        export_model({}, tmp_path, tmp_path / "out")


def test_arguments_that_cannot_be_exported_are_errors(llama, tmp_path):
    with pytest.raises(CheckpointError, match="dtype='bf16' is invalid: expected float32, bfloat16, float16, float64"):
        export_model({}, tmp_path, tmp_path / "out", dtype="bf16")
    with pytest.raises(CheckpointError, match=r"no adapters to export: it was trained without lora\.rank"):
        export_model(llama[1], llama[0], tmp_path / "out", adapter=True)
    with CheckpointStore(tmp_path / "checkpoints").begin(3) as directory:
        save_state([1], directory / "data")
    with pytest.raises(CheckpointError, match="has no component 'actor'; it has data"):
        export_model(tmp_path / "checkpoints" / "step_000003", llama[0], tmp_path / "out")


def test_full_disk_leaves_no_partial_export(tmp_path, small_disk):
    large: dict[str, Any] = SIZES | {"vocab_size": 1 << 16}
    model_dir = make_model_directory(tmp_path / "model", LlamaConfig(**large))
    message = r"small_disk/out' was not written \(4\.0 MiB of weights\): .*No space left on device"
    with pytest.raises(CheckpointError, match=message):
        export_model(weights_of(make_model(LlamaConfig(**large))), model_dir, small_disk / "out")
    assert list(small_disk.iterdir()) == []


ATTENTION = ("q_proj", "v_proj")


@pytest.fixture(params=["llama", "qwen3_moe"])
def adapted(request, tmp_path, tiny_model, rollout_rows):
    """Make a checkpoint of a model trained with adapters; return it, its base model and the merged weights."""
    from hybridflow.config import LoRAConfig, MemoryConfig, ModelConfig, OptimizerConfig
    from hybridflow.engines import TorchEngine

    is_dense = request.param == "llama"
    base = str(tiny_model("llama") if is_dense else write_family(tmp_path / "experts", request.param))
    lora = LoRAConfig(rank=3, alpha=5) if is_dense else LoRAConfig(rank=3, alpha=5, targets=ATTENTION)
    engine = TorchEngine(
        base,
        "policy",
        model=ModelConfig(path=base),
        memory=MemoryConfig(),
        optimizer=OptimizerConfig(lr=0.05),
        lora=lora,
    )
    rows = rollout_rows([3, 1], [4, 2])
    for _ in range(3):
        engine.update(rows, lambda outputs, part: (outputs["log_probs"].sum(), {}))
    info = {"models": {"model.path": model_fingerprint(base)}}
    with CheckpointStore(tmp_path / "checkpoints").begin(3, info=info) as directory:
        save_state(engine.state_dict(), directory / "actor")
    weights = {name: weight.clone() for name, weight in engine.weights()}
    return tmp_path / "checkpoints" / "step_000003", base, weights


def test_adapters_are_merged_into_base_weights(adapted, tmp_path):
    checkpoint, base, merged = adapted
    export_model(checkpoint, base, tmp_path / "out")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    before = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in merged.items())
    changed = "model.layers.0.self_attn.v_proj.weight"
    assert not torch.equal(loaded[changed], before[changed])
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(f"{base}/model.safetensors").keys()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_peft_loads_exported_adapters(adapted, tmp_path):
    from peft import AutoPeftModelForCausalLM, PeftModel

    checkpoint, base, merged = adapted
    assert export_model(checkpoint, base, tmp_path / "out", adapter=True) == "float32"
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == ["adapter_model.safetensors"]
    assert "library_name: peft" in (tmp_path / "out" / "README.md").read_text()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out").merge_and_unload()
    found_by_itself = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").merge_and_unload()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, merged[name])
        assert torch.equal(parameter, found_by_itself.get_parameter(name))
