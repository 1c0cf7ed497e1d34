import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.data import SFTDataset, write_conversation_file
from hybridflow.errors import DataError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
WITHOUT_EOS = TEMPLATE.replace("<eos>", "")
FORGETFUL = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' and not loop.last %}-{% else %}{{ m.content }}"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def chat(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture
def parts(char_tokenizer, tmp_path):
    """Return a function from a conversation to its prompt and response as texts, with uncounted tokens in brackets."""

    def read(messages, chat_template=TEMPLATE):
        tokenizer = char_tokenizer(chat_template=chat_template)
        file = write_conversation_file(tmp_path / "chat.parquet", [messages])
        columns = SFTDataset(file, tokenizer, 40, 40).collate([0]).batch
        response, mask = columns["responses"][0], columns["response_mask"][0]
        assert columns["attention_mask"].all()
        marked = "".join(
            tokenizer.decode([token]) if counts else f"({tokenizer.decode([token])})"
            for token, counts in zip(response.tolist(), mask.tolist(), strict=True)
        )
        return tokenizer.decode(columns["prompts"][0]), marked.replace(")(", "")

    return read


def test_each_answer_counts_up_to_its_eos(parts):
    assert parts(chat("x", "yy", "z", "w")) == ("u:x\na:", "yy<eos>(\nu:z\na:)w<eos>")


def test_messages_after_the_last_answer_are_left_out(parts):
    assert parts(chat("x", "y", "z")) == ("u:x\na:", "y<eos>")


def test_eos_is_added_if_the_template_writes_none(parts):
    assert parts(chat("x", "y"), WITHOUT_EOS) == ("u:x\na:", "y\n<eos>")


def test_single_answer_needs_no_template(parts):
    assert parts(chat("x", "y"), None) == ("x", "y<eos>")


def test_system_message_belongs_to_the_prompt(parts):
    messages = [{"role": "system", "content": "be"}, *chat("x", "y")]
    assert parts(messages) == ("s:be\nu:x\na:", "y<eos>")


@pytest.mark.parametrize(
    ("messages", "template", "problem"),
    [
        (chat("x"), TEMPLATE, "row 0: the conversation has the roles user; expected a message of the assistant"),
        (chat("x", "y")[1:], TEMPLATE, "has the roles assistant; expected"),
        (chat("x", "y", "z", "w"), None, "2 messages of the assistant need a chat template"),
        (chat("x", "y", "z", "w"), FORGETFUL, "the chat template changes the messages before message 3"),
    ],
)
def test_invalid_conversations_are_errors(parts, messages, template, problem):
    with pytest.raises(DataError, match=problem):
        parts(messages, template)


def test_fingerprints_of_conversations_differ_by_answer(char_tokenizer, tmp_path):
    files = [
        write_conversation_file(tmp_path / f"{number}.parquet", [messages])
        for number, messages in enumerate((chat("x", "y", "z", "w"), chat("x", "y", "z", "w")[:2] + chat("z", "v")))
    ]
    tokenizer = char_tokenizer(chat_template=TEMPLATE)
    prints = {SFTDataset(file, tokenizer, 40, 40).fingerprint for file in files}
    assert len(prints) == 2


def test_file_with_messages_and_response_is_read_as_conversations(char_tokenizer, tmp_path, caplog):
    row = {"messages": chat("x", "y"), "prompt": chat("a")[:1], "response": "b"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "both.parquet")
    with caplog.at_level(logging.WARNING):
        dataset = SFTDataset(tmp_path / "both.parquet", char_tokenizer(chat_template=TEMPLATE), 40, 40)
    assert "have the columns `messages` and `response`; `response` is ignored" in caplog.text
    assert dataset.longest == len("u:x\na:y") + 1
