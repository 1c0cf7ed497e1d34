import json
import logging

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hybridflow.data import RLHFDataset, load_tokenizer, stop_token_ids
from hybridflow.data.tokenizer import require_tokenizer
from hybridflow.errors import DataConfigError, DataError


def test_saved_tokenizer_keeps_its_padding_token(char_tokenizer, tmp_path):
    char_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer("ab")["input_ids"] == [4, 5]


def test_eos_pads_without_a_padding_token_and_is_logged(char_tokenizer, tmp_path, caplog):
    char_tokenizer(eos_token="<eos>").save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    assert "has no padding token; EOS ('<eos>') pads instead" in caplog.text


def test_tokenizer_without_eos_is_an_error_with_the_fix(char_tokenizer, tmp_path):
    char_tokenizer(pad_token="<pad>").save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r'no EOS token.*"eos_token" in tokenizer_config.json'):
        load_tokenizer(tmp_path)


def test_directory_without_a_tokenizer_is_an_error(char_tokenizer, tmp_path):
    with pytest.raises(DataError, match="is not a directory"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"'.*empty' has no tokenizer: expected tokenizer\.json"):
        load_tokenizer(tmp_path / "empty")
    char_tokenizer().save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(tmp_path / "broken")


def test_tokenizer_check_requires_a_vocabulary_and_names_the_key(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')  # of which transformers makes an empty tokenizer
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataConfigError, match=r"^model\.path='.*' has no tokenizer: expected tokenizer\.json"):
        require_tokenizer(tmp_path, "model.path")
    (tmp_path / "vocab.json").write_text("{}")
    require_tokenizer(tmp_path, "model.path")


@pytest.mark.parametrize(
    ("settings", "expected"), [({"eos_token_id": [9, 7]}, (1, 7, 9)), ({"eos_token_id": 5}, (1, 5)), ({}, (1,))]
)
def test_stop_ids_come_from_the_generation_config_and_the_tokenizer(char_tokenizer, tmp_path, settings, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert stop_token_ids(char_tokenizer(), tmp_path) == expected


def test_stop_ids_without_a_generation_config_come_from_the_tokenizer(char_tokenizer, tmp_path):
    assert stop_token_ids(char_tokenizer(), tmp_path) == (1,)
    assert stop_token_ids(char_tokenizer()) == (1,)


def test_stop_ids_without_a_generation_config_come_from_the_model_config(char_tokenizer, tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 5]}')
    assert stop_token_ids(char_tokenizer(), tmp_path) == (1, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert stop_token_ids(char_tokenizer(), tmp_path) == (1, 7)


@pytest.mark.parametrize("content", ["{", '{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}', "[[2]]"])
def test_malformed_generation_config_is_an_error(char_tokenizer, tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=r"generation_config.json"):
        stop_token_ids(char_tokenizer(), tmp_path)


def test_text_that_the_tokenizer_cannot_encode_is_an_error(prompt_file):
    backend = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    with pytest.raises(DataError, match=r"the tokenizer cannot encode the texts: .*give it an unknown token"):
        RLHFDataset(prompt_file(["b"]), tokenizer, 8)
