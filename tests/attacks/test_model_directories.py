"""Damaged and hostile model directories, one line each: the damage and what the error says."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.config import load_config
from hybridflow.data import load_tokenizer
from hybridflow.data.chat_prompts import PromptEncoder
from hybridflow.errors import DataError, HybridFlowError, ModelError, RolloutConfigError
from hybridflow.models.loading import load_causal_lm, load_value_model
from hybridflow.trainers.build.preconditions import require_rollout_engine, with_required_files

NAN, INFINITY = float("nan"), float("inf")
GENERATION = "generation_config.json"
BIAS, UP = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def directory(tiny_model, tmp_path) -> Path:
    """Make a copy of a model directory, which a test may damage."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def config(**changes):
    """Return a damage that sets keys of config.json."""

    def damage(directory):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def text(content, name="config.json"):
    """Return a damage that replaces a file."""
    return lambda directory: (directory / name).write_text(content)


def weight(name, change):
    """Return a damage that changes one weight by a function, or adds a weight."""

    def damage(directory):
        weights = load_file(directory / "model.safetensors")
        weights[name] = change if isinstance(change, torch.Tensor) else change(weights[name])
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    return damage


def in_two_files(directory):
    """Store one weight in a second file too."""
    weights, name = load_file(directory / "model.safetensors"), "model.norm.weight"
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    save_file({name: weights[name]}, directory / "b.safetensors", metadata={"format": "pt"})
    index({"weight_map": dict.fromkeys(weights, "a.safetensors") | {name: "b.safetensors"}})(directory)


def index(document):
    """Return a damage that adds an index of the weights beside their file."""
    return text(document if isinstance(document, str) else json.dumps(document), "model.safetensors.index.json")


def pipe(name):
    """Return a damage that replaces a file by a named pipe, from which a read would wait for ever."""

    def damage(directory):
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return damage


def rope(**changes):
    return config(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0} | changes)


CONFIGS = [
    ("a list", text("[]"), "expected a table, got list"),
    ("unknown model type", config(model_type="evil"), r"model_type='evil' is unknown to the installed transformers"),
    ("architectures of a text", config(architectures="Llama"), r"architectures='Llama' is not a list"),
    ("a quantized model", config(quantization_config={"bits": 4}), r"quantized .* use the original weights"),
    ("ten million layers", config(num_hidden_layers=10_000_000), r"num_hidden_layers=10000000 is out of range: .*"),
    (
        "more experts of a token than there are",
        config(num_experts=4, num_experts_per_tok=8),
        r"tok=8 is out of range: .*4",
    ),
    ("a huge width", config(hidden_size=10**9), r"hidden_size=1000000000 is out of range"),
    ("NaN for the rotary base", config(rope_theta=NAN), r"rope_theta=nan is not a finite number"),
    ("NaN inside a table", rope(rope_theta=NAN), r"rope_parameters\.rope_theta=nan is not a finite number"),
    ("infinity for epsilon", config(rms_norm_eps=INFINITY), r"rms_norm_eps=inf is not a finite number"),
    ("a rotary base of 0", rope(rope_theta=0), r"rope_parameters\.rope_theta=0 is out of range: expected a number"),
    ("a rotary base of text", rope(rope_theta="x"), r"cannot be loaded"),
    ("a negative epsilon", config(rms_norm_eps=-1.0), r"rms_norm_eps=-1\.0 is out of range: expected 0 or more"),
    ("no position", config(max_position_embeddings=0), r"max_position_embeddings=0 is out of range: expected 1 to"),
    ("a window of 0", config(sliding_window=0), r"sliding_window=0 is out of range: expected 1 to .*, or null for a"),
    ("a negative window", config(sliding_window=-3), r"sliding_window=-3 is out of range"),
    ("a huge head", config(head_dim=100_000), r"head_dim=100000 is out of range: expected 1 to 4,096"),
    (
        "heads that do not divide",
        config(num_key_value_heads=3),
        r"num_key_value_heads=3 is invalid: expected a divisor of num_attention_heads=4",
    ),
    (
        "heads of a linear layer that do not divide",
        config(linear_num_value_heads=4, linear_num_key_heads=3),
        r"linear_num_key_heads=3 is invalid: expected a divisor of linear_num_value_heads=4",
    ),
    ("groups of experts", config(n_routed_experts=4, n_group=3), r"n_group=3 .* a divisor of n_routed_experts=4"),
    ("more groups than there are", config(n_group=2, topk_group=3), r"topk_group=3 is out of range: expected 1 to n_g"),
    ("too many types of layers", config(layer_types=["full_attention"] * 3), r"layer_types has 3 names: .*layers=2"),
    ("an unknown layer", config(layer_types=["evil"] * 2), r"layer_types has 'evil': expected some of full_attention"),
    (
        "windows without a size",
        config(layer_types=["sliding_attention"] * 2, sliding_window=None),
        r"sliding_window=null is invalid: expected the window of its layers",
    ),
    ("a soft cap of 0", config(attn_logit_softcapping=0), r"attn_logit_softcapping=0 is out of range: expected a num"),
    ("a scale of 0", config(logits_scaling=0.0), r"logits_scaling=0\.0 is out of range: expected a number above 0"),
    (
        "too much rotation",
        config(partial_rotary_factor=1.5),
        r"partial_rotary_factor=1\.5 is out of range: .* most 1",
    ),
    ("no vocabulary", config(vocab_size=0), r"vocab_size=0 is out of range: expected 1 to 10,000,000"),
    ("a negative rank", config(kv_lora_rank=-1), r"kv_lora_rank=-1 is out of range: expected 0 to"),
    ("a key of a family's own", config(model_type="gpt2", n_layer=-1), r"n_layer=-1 is out of range: expected 1 to"),
    ("an unknown function", config(hidden_act="evil"), r"its code does not know 'evil', a name in config\.json"),
    (
        "a bad language model",
        config(text_config={"sliding_window": 0}),
        r"text_config\.sliding_window=0 is out of",
    ),
    (
        "a bad language model's heads",
        config(text_config={"num_attention_heads": 4, "num_key_value_heads": 3}),
        r"text_config\.num_key_value_heads=3 is invalid",
    ),
    ("a padding token beyond the vocabulary", config(pad_token_id=40), r"pad_token_id=40 is not in the vocabulary"),
    ("an unknown dtype", config(dtype="evil"), r"dtype='evil' is not a floating-point type"),
    ("a dtype of integers", config(torch_dtype="int8"), r"torch_dtype='int8' is not a floating-point type"),
    ("deep nesting", text("[" * 100_000), r"maximum recursion depth exceeded"),
    ("an integer of 5,000 digits", text('{"vocab_size": ' + "9" * 5000 + "}"), r"Exceeds the limit"),
    ("a pipe", pipe("config.json"), r"config\.json' is a FIFO, not a regular file"),
    ("a bias that the model lacks", weight(BIAS, torch.ones(32)), r"have .*q_proj\.bias, wh"),
    ("NaN", weight("model.norm.weight", lambda w: w * NAN), r"model\.norm\.weight has NaN or infinity as"),
    ("beyond float32", weight("model.norm.weight", lambda w: w.double() * 1e300), r"norm\.weight has NaN or"),
    ("transposed", weight(UP, lambda w: w.T.contiguous()), r"up_proj\.weight has shape"),
]

WEIGHTS = [
    ("a weight in two files", in_two_files, r"norm\.weight is in a\.safetensors and in"),
    (
        "only a pickle",
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        r"no file named model\.safe",
    ),
    ("a pipe", pipe("model.safetensors"), r"model\.safetensors.* not a regular file"),
    ("uint8", weight("lm_head.weight", lambda w: w.to(torch.uint8)), r"lm_head\.weight .* stored as U8, .*"),
    ("float8", weight("lm_head.weight", lambda w: w.to(torch.float8_e4m3fn)), r"lm_head\.weight .* stored as"),
    ("an index with a number", index({"weight_map": {"a": 3}}), r"lists 3, which is not a file"),
    ("an index without a map", index({}), r"has no weight_map"),
    ("an index of deep nesting", index("[" * 100_000), r"maximum recursion depth"),
]

CODE = '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}, "tokenizer_class": "Evil"}'
TOKENS = [
    ("a stop token beyond the vocabulary", text('{"eos_token_id": 1000000}', GENERATION), r"stop token 1000000 .*"),
    ("a pipe for a tokenizer", pipe("tokenizer.json"), r"tokenizer\.json' is a FIFO, not a regular file"),
    ("a pipe for a tokenizer's settings", pipe("tokenizer_config.json"), r"tokenizer_config\.json' is a FIFO, not"),
    ("a tokenizer with code", text(CODE, "tokenizer_config.json"), r"it needs code of its directory, which"),
    ("a smaller vocabulary than the tokenizer's", config(vocab_size=8), r"token '.*' of id \d+, but the model has a"),
]


def cases(table):
    return pytest.mark.parametrize(("damage", "message"), [c[1:] for c in table], ids=[c[0] for c in table])


@cases(CONFIGS)
def test_a_bad_config_is_a_model_error(directory, damage, message):
    damage(directory)
    with pytest.raises(ModelError, match="(?is)" + message) as error:
        load_causal_lm(directory)
    assert "trust_remote_code" not in str(error.value)
    assert "such as Llama" not in str(error.value)  # the family is not the problem
    assert str(directory) in str(error.value)


@cases(WEIGHTS)
def test_bad_weights_are_a_model_error(directory, damage, message):
    damage(directory)
    with pytest.raises(ModelError, match="(?is)" + message):
        load_causal_lm(directory)


@cases(TOKENS)
def test_tokens_that_the_model_lacks_are_an_error(directory, damage, message):
    damage(directory)
    with pytest.raises(HybridFlowError, match="(?is)" + message) as error:
        with_required_files(load_config(None, [f"model.path={directory}"]))
    assert "trust_remote_code" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_head_that_differs_from_its_embedding_is_an_error(directory):
    config(tie_word_embeddings=True)(directory)
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from the embedding, but config\.json has tie_word"):
        load_causal_lm(directory)
    load_value_model(directory)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    weight("lm_head.weight", embedding.clone())(directory)
    assert torch.equal(load_causal_lm(directory).get_parameter("model.embed_tokens.weight"), embedding)


LOOPS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
TEMPLATES = [
    ("empty", "", "chat template is empty"),
    ("a syntax error", "{% if %}", "chat template rejects the messages"),
    ("a text of 100 GB", "{{ 'x' * 10**11 }}", "rejects the messages: MemoryError"),
    ("a way out of the sandbox", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "rejects the messages: access to"),
    ("loops in loops", LOOPS, "took longer than 0.5 s for one prompt"),
]


@cases(TEMPLATES)
def test_a_bad_chat_template_is_a_data_error(tiny_model, monkeypatch, damage, message):
    monkeypatch.setattr("hybridflow.data.chat_prompts.RENDERING_LIMIT_S", 0.5)
    tokenizer = load_tokenizer(tiny_model("llama"))
    tokenizer.chat_template = damage
    with pytest.raises(DataError, match=message):
        PromptEncoder(tokenizer, True).text([{"role": "user", "content": "w3"}], "row 0")
    assert PromptEncoder(tokenizer, False).text([{"role": "user", "content": "w3"}], "row 0") == "w3"


def test_prompts_of_unknown_tokens_alone_are_an_error(tiny_model, tmp_path):
    from hybridflow.data import RLHFDataset, prompt_row, write_prompt_file

    rows = [
        prompt_row(data_source="copy", prompt=prompt, ground_truth="1", split="train", index=i)
        for i, prompt in enumerate(["w3 zebra", "zebra giraffe"])
    ]
    file = write_prompt_file(tmp_path / "prompts.parquet", rows)
    with pytest.raises(
        DataError, match="row 1: the tokenizer knows no part of the prompt, all of whose tokens are '<unk>'"
    ):
        RLHFDataset([str(file)], load_tokenizer(tiny_model("llama")), max_prompt_length=8)


def test_vllm_with_an_unsuitable_draft_or_dtype_is_refused_early(directory, tiny_model):
    draft, fp8 = tiny_model("llama", vocab_size=48), "rollout.quantization=fp8 algorithm.rollout_weights=token"
    for changes, message in (
        (
            f"rollout.speculative.model={draft}",
            r"a vocabulary of 48 tokens, but model\.path=.* one of 40; give a draft",
        ),
        ("rollout.speculative.model=Qwen/Qwen2.5-0.5B", r"='Qwen/.*' is not a model directory: config\.json not found"),
        (f"{fp8} model.dtype=float32", r"quantization='fp8' is not supported with model\.dtype='float32'"),
    ):
        drafts = ["rollout.speculative.num_speculative_tokens=3"] * ("model=" in changes)
        given = [f"model.path={directory}", "rollout.backend=vllm", *drafts, *changes.split()]
        with pytest.raises(RolloutConfigError, match=message):
            require_rollout_engine(load_config(None, given))
