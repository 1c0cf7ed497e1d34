"""Conversations with tools in files of all kinds, with columns of other names, and malformed ones."""

import json

import pyarrow
import pytest

from fixtures.row_files import write_rows
from hybridflow.cli.api.rows import records_of
from hybridflow.data import RowForm, SFTDataset, write_conversation_file
from hybridflow.data.row_forms import rows_of
from hybridflow.data.turns import TurnEncoder, Turns
from hybridflow.environments import EpisodeEncoder
from hybridflow.errors import DataConfigError, DataError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def schema(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def episode(name, arguments, content=""):
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]


ROWS = [
    {"messages": episode("add", {"a": 1, "b": None}), "tools": [schema("add", a={"type": "integer", "default": None})]},
    {"messages": episode("look", {"words": ["x", "y"]}), "tools": [schema("look", words={"type": "array"})]},
]
TEXTS = [
    {"messages": episode("add", '{"a": 1, "b": null}'), "tools": json.dumps(ROWS[0]["tools"])},
    {"messages": episode("look", '{"words": ["x", "y"]}'), "tools": json.dumps(ROWS[1]["tools"])},
]
"""The same as JSON texts."""


@pytest.fixture
def read(char_tokenizer):
    """Return a function from a file to the (messages, tools, place) of each conversation with tools."""

    def read(file, form=None, template=TEMPLATE):
        seen = []

        class Encoder(TurnEncoder):
            def __call__(self, *conversation):
                seen.append(conversation)
                return [Turns([4], [5], [True])] * 2

        tokenizer = char_tokenizer(chat_template=template)
        dataset = SFTDataset(file, tokenizer, 40, 40, form=form or RowForm(), encode_episode=Encoder(tokenizer))
        assert len(dataset) == 2 * len(seen)
        return seen

    return read


@pytest.mark.parametrize(
    ("suffix", "rows"),
    [(".jsonl", ROWS), (".json", ROWS), (".jsonl", TEXTS), (".json", TEXTS), (".parquet", TEXTS)],
)
def test_json_objects_and_texts_are_the_same_conversations(read, tmp_path, suffix, rows):
    (messages, tools, place), second = read(write_rows(tmp_path / f"a{suffix}", rows))
    assert (messages, tools) == (ROWS[0]["messages"], ROWS[0]["tools"])
    assert second[:2] == (ROWS[1]["messages"], ROWS[1]["tools"])
    assert place == f"{tmp_path}/a{suffix}: " + ("line 1" if suffix == ".jsonl" else "row 0")


@pytest.mark.parametrize("form", [RowForm(), RowForm({"tools": "tools"})], ids=["plain", "named"])
def test_parquet_objects_lose_the_keys_of_other_rows(read, tmp_path, form):
    first, second = read(write_rows(tmp_path / "a.parquet", ROWS), form)
    assert first[0] == episode("add", {"a": 1})
    assert first[1] == [schema("add", a={"type": "integer"})]
    assert second[:2] == (ROWS[1]["messages"], ROWS[1]["tools"])


def test_a_table_of_a_program_loses_the_keys_of_other_rows():
    records = records_of(pyarrow.Table.from_pylist(ROWS), "examples", 0, "")
    first, _ = rows_of(records, "examples", RowForm(), "train")
    assert first["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_the_writer_keeps_conversations_with_tools(read, tmp_path):
    tools = [*ROWS[0]["tools"], *ROWS[1]["tools"]]
    file = write_conversation_file(tmp_path / "a.parquet", [row["messages"] for row in ROWS], tools)
    assert [each[:2] for each in read(file)] == [(row["messages"], tools) for row in ROWS]


def test_columns_of_other_names_and_a_function_make_conversations(read, tmp_path):
    renamed = [{"chat": {"turns": row["messages"]}, "functions": row["tools"]} for row in ROWS]
    form = RowForm({"messages": "chat.turns", "tools": "functions"})
    assert [each[:2] for each in read(write_rows(tmp_path / "a.jsonl", renamed), form)] == [
        (row["messages"], row["tools"]) for row in ROWS
    ]
    (tmp_path / "own.py").write_text(
        "def form(row):\n    return {'messages': row['chat']['turns'], 'tools': row['functions']}\n"
    )
    form = RowForm(map=f"{tmp_path}/own.py:form")
    assert [each[1] for each in read(write_rows(tmp_path / "b.jsonl", renamed), form)] == [row["tools"] for row in ROWS]


def test_a_call_without_content_has_an_empty_one_and_no_calls_are_none(read, tmp_path):
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}]
    ((messages, *_),) = read(write_rows(tmp_path / "a.jsonl", [{"messages": plain, "tools": []}]))
    assert messages == [plain[0], {"role": "assistant", "content": "b"}]
    ((messages, *_),) = read(write_rows(tmp_path / "c.jsonl", [{"messages": episode("add", {}, None)}]))
    assert messages == episode("add", {})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": "no JSON"}, "column 'messages' must be a list, or a JSON text of one, got 'no JSON'"),
        ({"tools": "{"}, "column 'tools' must be a list, or a JSON text of one, got '{'"),
        (
            {"tools": '{"name": "add"}'},
            r"column 'tools' must be a list of JSON schemas, got \{'name': 'add'\}; expected",
        ),
        ({"tools": [{"name": "add"}]}, r"tool 0 of 'tools' needs a function with a name, as in \{\"type\".*got"),
        ({"messages": episode("add", "{a: 1}")}, "message 1 of 'messages': call 0, of 'add': arguments are not JSON"),
        ({"messages": episode("add", [1])}, r"arguments must be an object, or a JSON text of one, got \[1\]; a call"),
        ({"messages": episode("", {})}, "call 0 needs a function with a name, as in"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
            r"message 0 of 'messages', of the role user, has tool_calls=\[\{\}\]; expected a list of calls",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
            "the content of message 1 of 'messages' must be a text, got None",
        ),
    ],
)
def test_malformed_conversations_are_errors_with_their_place(read, tmp_path, row, problem):
    file = write_rows(tmp_path / "a.jsonl", [ROWS[0], {**ROWS[1], **row}])
    with pytest.raises(DataError, match=f"^{tmp_path}/a.jsonl: line 2: .*{problem}"):
        read(file)


@pytest.mark.parametrize("options", [{}, {"chat_template": False, "encode_episode": True}])
def test_tools_need_a_chat_template_and_an_encoder_of_tools(char_tokenizer, tmp_path, options):
    file, tokenizer = write_rows(tmp_path / "a.jsonl", ROWS), char_tokenizer(chat_template=TEMPLATE)
    if "encode_episode" in options:
        options = {**options, "encode_episode": EpisodeEncoder(tokenizer)}
    with pytest.raises(DataConfigError, match=r"line 1: the conversation has tools, .*encode_episode"):
        SFTDataset(file, tokenizer, 40, 40, **options)
