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
from hybridflow.errors import DataError, HybridFlowError, ModelError
from hybridflow.models import load_causal_lm, load_value_model
from hybridflow.models.sharded_loading import StoredModel
from hybridflow.trainers.preconditions import require_files

pytestmark = pytest.mark.slow

NAN, INFINITY = float("nan"), float("inf")
GENERATION = "generation_config.json"


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
    """Return a damage that changes one weight."""

    def damage(directory):
        weights = load_file(directory / "model.safetensors")
        weights[name] = change(weights[name])
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    return damage


def index(document):
    """Return a damage that adds an index of the weights beside their file."""
    return text(document if isinstance(document, str) else json.dumps(document), "model.safetensors.index.json")


def pipe(name):
    """Return a damage that replaces a file by a named pipe, from which a read would wait for ever."""

    def damage(directory):
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return damage


ROPE = {"rope_type": "default", "rope_theta": NAN}
CONFIGS = [
    ("not JSON", text("{"), "not a valid JSON file"),
    ("a list", text("[]"), "expected a table, got list"),
    ("a number", text("3"), "expected a table, got int"),
    ("an empty table", text("{}"), "should have a `model_type` key"),
    ("unknown model type", config(model_type="evil"), r"model_type='evil' is unknown to the installed transformers"),
    ("model type of a number", config(model_type=3), r"model_type=3 is unknown"),
    ("architectures of a number", config(architectures=5), r"architectures=5 is not a list of names"),
    ("architectures of numbers", config(architectures=[5]), r"architectures=\[5\] is not a list of names"),
    ("architectures of a text", config(architectures="Llama"), r"architectures='Llama' is not a list"),
    ("a quantized model", config(quantization_config={"bits": 4}), r"quantized .* use the original weights"),
    (
        "ten million layers",
        config(num_hidden_layers=10_000_000),
        r"num_hidden_layers=10000000 is out of range: .* 10,000",
    ),
    ("no layer", config(num_hidden_layers=0), r"num_hidden_layers=0 is out of range: expected 1"),
    ("negative layers", config(num_hidden_layers=-1), r"num_hidden_layers=-1 is out of range"),
    ("a huge width", config(hidden_size=10**9), r"hidden_size=1000000000 is out of range"),
    ("a huge vocabulary", config(vocab_size=10**12), r"vocab_size=1000000000000 is out of range"),
    ("no head", config(num_attention_heads=0), r"num_attention_heads=0 is out of range"),
    ("a text for a width", config(hidden_size="wide"), r"'hidden_size' expected int, got str"),
    ("NaN for the rotary base", config(rope_theta=NAN), r"rope_theta=nan is not a finite number"),
    ("NaN inside a table", config(rope_parameters=ROPE), r"rope_parameters\.rope_theta=nan is not a finite number"),
    ("infinity for epsilon", config(rms_norm_eps=INFINITY), r"rms_norm_eps=inf is not a finite number"),
    ("another width than the weights", config(intermediate_size=64), r"has shape .* in the weights, but .* by config"),
    ("more layers than the weights", config(num_hidden_layers=3), r"the weights lack model\.layers\.2"),
    (
        "transposed",
        weight("model.layers.0.mlp.up_proj.weight", lambda w: w.T.contiguous()),
        r"up_proj\.weight has shape",
    ),
]

WEIGHTS = [
    ("empty", text("", "model.safetensors"), "deserializing header"),
    ("text", text("x" * 5000, "model.safetensors"), "deserializing header"),
    ("a pipe", pipe("model.safetensors"), r"model\.safetensors is not a regular file"),
    ("int32", weight("model.norm.weight", lambda w: w.int()), r"model\.norm\.weight in .* is stored as I32"),
    ("uint8", weight("lm_head.weight", lambda w: w.to(torch.uint8)), r"lm_head\.weight .* stored as U8, .* quantized"),
    ("boolean", weight("lm_head.weight", lambda w: w.bool()), r"lm_head\.weight .* stored as BOOL"),
    ("float8", weight("lm_head.weight", lambda w: w.to(torch.float8_e4m3fn)), r"lm_head\.weight .* stored as F8_E4M3"),
    ("an index with a parent folder", index({"weight_map": {"a": "../x"}}), r"lists '\.\./x', which is not a file"),
    ("an index with an absolute path", index({"weight_map": {"a": "/etc/passwd"}}), r"lists '/etc/passwd'"),
    ("an index with a folder", index({"weight_map": {"a": ".."}}), r"lists '\.\.'|is not a regular file"),
    ("an index with an empty name", index({"weight_map": {"a": ""}}), r"lists ''|is not a regular file"),
    ("an index with a number", index({"weight_map": {"a": 3}}), r"lists 3, which is not a file"),
    ("an index of null", index({"weight_map": None}), r"has no weight_map"),
    ("an index of a list", index({"weight_map": ["a"]}), r"has no weight_map"),
    ("an empty index", index({"weight_map": {}}), r"has no weight_map"),
    ("an index without a map", index({}), r"has no weight_map"),
    ("an index that is a list", index([]), r"has no weight_map"),
    ("an index that is not JSON", index("{"), r"cannot be"),
    ("an index of a missing file", index({"weight_map": {"a": "absent.safetensors"}}), r"absent\.safetensors"),
]

TOKENS = [
    (
        "a stop token beyond the vocabulary",
        text('{"eos_token_id": 1000000}', GENERATION),
        r"stop token 1000000 .* not in the model's",
    ),
    ("a negative stop token", text('{"eos_token_id": [1, -1]}', GENERATION), r"stop token -1"),
    ("a stop token of text", text('{"eos_token_id": "</s>"}', GENERATION), r"must be a number or a list"),
    ("a smaller vocabulary than the tokenizer's", config(vocab_size=8), r"token '.*' of id \d+, but the model has a"),
]


def cases(table):
    return pytest.mark.parametrize(("damage", "message"), [c[1:] for c in table], ids=[c[0] for c in table])


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
@cases(CONFIGS)
def test_a_bad_config_is_a_model_error(directory, load, damage, message):
    damage(directory)
    with pytest.raises(ModelError, match="(?is)" + message) as error:
        load(directory)
    assert "trust_remote_code" not in str(error.value)
    assert str(directory) in str(error.value)


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model, StoredModel])
@cases(WEIGHTS)
def test_bad_weights_are_a_model_error(directory, load, damage, message):
    damage(directory)
    with pytest.raises(ModelError, match="(?is)" + message):
        load(directory)


@cases(TOKENS)
def test_tokens_that_the_model_lacks_are_an_error(directory, damage, message):
    damage(directory)
    with pytest.raises(HybridFlowError, match=message):
        require_files(load_config(None, [f"model.path={directory}"]))


LOOPS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
TEMPLATES = [
    ("empty", "", "chat template is empty"),
    ("only spaces", " \n", "chat template is empty"),
    ("a syntax error", "{% if %}", "chat template rejects the messages"),
    ("an error of its own", "{{ raise_exception('no system') }}", "rejects the messages: no system"),
    ("a division by zero", "{{ 1 / 0 }}", "rejects the messages: division by zero"),
    ("a text of 100 GB", "{{ 'x' * 10**11 }}", "rejects the messages: MemoryError"),
    ("endless recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "rejects the messages: maximum recursion"),
    ("a way out of the sandbox", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "rejects the messages: access to"),
    ("a huge range", "{% for a in range(10**9) %}{% endfor %}", "rejects the messages: Range too big"),
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
