import logging

import pytest

from hybridflow.data.chat_prompts import PromptEncoder, _warn_without_generation_prompt, read_messages
from hybridflow.data.parquet_rows import Row
from hybridflow.errors import DataError

CHATML = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)
QUESTION = [{"role": "user", "content": "a"}]


@pytest.fixture
def warnings_of(char_tokenizer, caplog):
    """Return a function that encodes a question twice with a chat template and returns the warnings."""
    _warn_without_generation_prompt.cache_clear()

    def warnings(template, **arguments):
        encoder = PromptEncoder(char_tokenizer(chat_template=template), chat_template=True)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                encoder.text(QUESTION, "row 0", **arguments)
        return [record.message for record in caplog.records]

    return warnings


def test_chat_template_without_generation_prompt_warns_once(warnings_of):
    (warning,) = warnings_of(CHATML)
    assert "renders the same text with and without add_generation_prompt" in warning
    assert "prompts end before '<assistant>'" in warning
    assert "{% if add_generation_prompt %}" in warning
    assert len(warnings_of(CHATML)) == 1  # the validation data, with the same template


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(CHATML + "{% if add_generation_prompt %}<assistant>{% endif %}", id="with generation prompt"),
        pytest.param(INST, id="answer follows the prompt directly"),
        pytest.param("{{ raise_exception('one message') if messages[1:] else 'a' }}", id="refuses an answer"),
        pytest.param(None, id="no template"),
    ],
)
def test_other_chat_templates_do_not_warn(warnings_of, template):
    assert warnings_of(template) == []


def test_ended_conversations_need_no_generation_prompt(warnings_of):
    assert warnings_of(CHATML, add_generation_prompt=False) == []


def test_text_parts_of_a_message_are_one_text():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    row = Row("file: row 0", {"prompt": [{"role": "user", "content": parts}]})
    assert read_messages(row) == [{"role": "user", "content": "a b"}]


@pytest.mark.parametrize(
    "part", [{"type": "image", "image": "x"}, {"type": "text"}, "text", {"type": "text", "text": 3}]
)
def test_a_part_that_is_not_a_text_is_an_error_that_shows_it(part):
    row = Row("file: row 0", {"prompt": [{"role": "user", "content": [part]}]})
    with pytest.raises(DataError, match=r"file: row 0: message 0 of 'prompt' has a part that is not a text: .*images"):
        read_messages(row)
