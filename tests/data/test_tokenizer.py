import logging
import os

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hybridflow.data import RLHFDataset, load_tokenizer, stop_token_ids
from hybridflow.data.chat_prompts import encode_texts
from hybridflow.data.chat_templates import NAMES
from hybridflow.data.tokenizer import require_tokenizer, response_texts
from hybridflow.errors import DataConfigError, DataError


def test_saved_tokenizer_keeps_its_padding_token_or_eos_pads(char_tokenizer, tmp_path, caplog):
    char_tokenizer().save_pretrained(tmp_path / "padded")
    tokenizer = load_tokenizer(tmp_path / "padded")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer("ab")["input_ids"]) == (0, 1, [4, 5])
    char_tokenizer(eos_token="<eos>").save_pretrained(tmp_path / "plain")
    with caplog.at_level(logging.INFO):
        assert load_tokenizer(tmp_path / "plain").pad_token_id == 1
    assert "has no padding token; EOS ('<eos>') pads instead" in caplog.text


def test_another_chat_template_is_a_name_a_file_or_a_text(char_tokenizer, tmp_path):
    char_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "own.jinja").write_text("{{ 'own' }}")
    (tmp_path / "none.txt").write_text("own")
    assert load_tokenizer(tmp_path / "model", chat_template=str(tmp_path / "own.jinja")).chat_template == "{{ 'own' }}"
    for name in NAMES:
        text = load_tokenizer(tmp_path / "model", chat_template=name).chat_template
        assert load_tokenizer(tmp_path / "model", chat_template=text).chat_template == text
    for wrong in ("chatml-tool", str(tmp_path), str(tmp_path / "none.txt")):
        with pytest.raises(DataConfigError, match=f"model.chat_template='{wrong}' is n"):
            load_tokenizer(tmp_path / "model", chat_template=wrong)
    (tmp_path / "broken.jinja").write_text("{% generation %}{% endgeneration %}\n{% for m in messages %}{{ m }")
    os.mkfifo(tmp_path / "pipe.jinja")
    for name, problem in (
        ("broken", r"broken\.jinja', line 2: unexpected '}'"),
        ("pipe", "is a FIFO, not a regular file"),
    ):
        with pytest.raises(DataConfigError, match=problem):
            load_tokenizer(tmp_path / "model", chat_template=str(tmp_path / f"{name}.jinja"))


def test_a_directory_without_a_usable_tokenizer_is_an_error_with_the_fix(char_tokenizer, tmp_path):
    (tmp_path / "empty").mkdir()
    char_tokenizer(pad_token="<pad>").save_pretrained(tmp_path / "no_eos")
    char_tokenizer().save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for name, message in (
        ("nowhere", "is not a directory"),
        ("empty", r"'.*empty' has no tokenizer: expected tokenizer\.json"),
        ("broken", "cannot be loaded"),
        ("no_eos", r'no EOS token.*"eos_token" in tokenizer_config.json'),
    ):
        with pytest.raises(DataError, match=message):
            load_tokenizer(tmp_path / name)


def test_tokenizer_check_requires_a_vocabulary_and_names_the_key(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')  # of which transformers makes an empty tokenizer
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataConfigError, match=r"^model\.path='.*' has no tokenizer: expected tokenizer\.json"):
        require_tokenizer(tmp_path, "model.path")
    (tmp_path / "vocab.json").write_text("{}")
    require_tokenizer(tmp_path, "model.path")


def test_a_response_keeps_special_tokens_that_are_text_of_the_model(char_tokenizer):
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "<end>"]})
    think, end = tokenizer.convert_tokens_to_ids(["<think>", "<end>"])
    row = [think, *tokenizer("ab")["input_ids"], tokenizer.pad_token_id, end, tokenizer.eos_token_id]
    assert response_texts(tokenizer, [row, [end]], (end,)) == ["<think>ab", ""]
    assert response_texts(tokenizer, [row]) == ["<think>ab<end>"]
    assert response_texts(tokenizer, [row, []], (), [[False, *[True] * 5], []]) == ["ab<end>", ""]
    assert tokenizer.batch_decode([[4, 5, 1]], skip_special_tokens=True) == response_texts(tokenizer, [[4, 5, 1]])


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ('{"eos_token_id": [9, 7]}', None, (1, 7, 9)),
        ('{"eos_token_id": 5}', None, (1, 5)),
        ("{}", None, (1,)),
        (None, None, (1,)),
        (None, '{"eos_token_id": [1, 5]}', (1, 5)),
        ('{"eos_token_id": 7}', '{"eos_token_id": [1, 5]}', (1, 7)),
    ],
)
def test_stop_ids_come_from_the_configurations_and_the_tokenizer(char_tokenizer, tmp_path, generation, model, expected):
    for name, text in (("generation_config.json", generation), ("config.json", model)):
        if text:
            (tmp_path / name).write_text(text)
    assert stop_token_ids(char_tokenizer(), tmp_path) == expected
    assert stop_token_ids(char_tokenizer()) == (1,)


@pytest.mark.parametrize("content", ["{", '{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}', "[[2]]"])
def test_malformed_generation_config_is_an_error(char_tokenizer, tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=r"generation_config.json"):
        stop_token_ids(char_tokenizer(), tmp_path)


def test_text_that_the_tokenizer_cannot_encode_is_an_error(prompt_file):
    backend = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    problem = r"row 1: the tokenizer cannot encode the text 'b': .*; give the tokenizer an unknown token, or use one"
    with pytest.raises(DataError, match=problem):
        RLHFDataset(prompt_file(["a", "b", "a"]), tokenizer, 8)
    with pytest.raises(DataError, match=r"^prompt 1: the text 'b.ud83d' is not valid Unicode; correct it\.$"):
        encode_texts(tokenizer, ["a", "b\ud83d"], ["prompt 0", "prompt 1"])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%d %b %Y, %%d %-d %A %H:%M') }}", "03 Feb 2020, %d 3 Monday 00:00"),
        (
            "\n  {% if strftime_now is defined %}x{% endif %}\n"
            "{% macro day() %}{{ strftime_now(format='%B %d') }}{% endmacro %}{{ day() }}",
            "\nxFebruary 03",
        ),
        ("  {%- set year = strftime_now('%Y') %}{{ year | int + 1 }}", "2021"),
    ],
)
def test_a_chat_template_reads_the_date_of_the_run(char_tokenizer, tmp_path, template, expected):
    tokenizer = char_tokenizer()
    for given in (template, {"default": template, "tool_use": template}):
        tokenizer.chat_template = given
        tokenizer.save_pretrained(tmp_path / "model")
        loaded = load_tokenizer(tmp_path / "model", "2020-02-03")
        assert loaded.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == expected
