"""The same rows from files of every kind, libraries and programs; pairs, ShareGPT, missing values; what errors say."""

import datetime
import json
import re
from decimal import Decimal
from importlib import import_module

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fixtures.row_files import write_rows
from hybridflow.cli.api.rows import file_of, records_of
from hybridflow.cli.api.rows import write_rows as store
from hybridflow.data import RowForm, prepare_files
from hybridflow.data.arrow_columns import values_of
from hybridflow.data.data_rows import read_data_rows
from hybridflow.data.row_forms import rows_of
from hybridflow.errors import DataError


def user(text):
    return [{"role": "user", "content": text}]


def said(text, **more):
    return [{"role": "assistant", "content": text, **more}]


def asked(name, **arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [*user("ask"), *said("", tool_calls=[call]), {"role": "tool", "content": "r"}]


def of_program(data, kind, tmp_path):
    """Return the file of rows that a program gives to `train`, `sft` or `dpo`."""
    rows = rows_of(records_of(data, "rows", 9, ""), kind, RowForm(), "train")
    file = file_of(rows, tmp_path, "train")
    store(rows, file)
    return file


def dataset(rows):
    return import_module("datasets").Dataset.from_list(rows, on_mixed_types="use_json")


def saved(rows, path):
    dataset(rows).save_to_disk(path)
    return path


def parquet_of_pandas(rows, path):
    pandas().DataFrame(rows).to_parquet(path)
    return path


def pandas():
    return import_module("pandas")


def prepared(rows, path):
    test = {"prompt": "other", "answer": "x"}
    files = [write_rows(path / f"{name}.jsonl", each) for name, each in (("a", rows), ("b", [test]))]
    return prepare_files("table", files[0], path / "out", test_file=files[1], data_source="rows").train_file


FILES = {
    "jsonl": lambda rows, path: write_rows(path / "a.jsonl", rows),
    "json": lambda rows, path: write_rows(path / "a.json", rows),
    "json of lines": lambda rows, path: write_rows(path / "b.jsonl", rows).rename(path / "b.json"),
    "parquet": lambda rows, path: write_rows(path / "a.parquet", rows),
    "parquet of pandas": lambda rows, path: parquet_of_pandas(rows, path / "b.parquet"),
    "folder": lambda rows, path: saved(rows, path / "saved"),
}
PROGRAMS = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "pandas": lambda rows: pandas().DataFrame(rows),
    "Dataset": dataset,
    "Dataset of arrays": lambda rows: dataset(rows).with_format("numpy"),
    "stream": lambda rows: dataset(rows).to_iterable_dataset(),
    "pyarrow": pa.Table.from_pylist,
}
ANY_TYPES = {"jsonl", "json", "json of lines", "folder", "prepare", *PROGRAMS} - {"pyarrow"}
"""Kinds that hold objects without keys, and values of several types in a column."""


def read(how, rows, kind, tmp_path):
    """Return the rows of a data set, by columns, without those that are missing."""
    if how in FILES:
        file = FILES[how](rows, tmp_path)
    elif how == "prepare":
        file = prepared(rows, tmp_path)
    else:
        file = of_program(PROGRAMS[how](rows), kind, tmp_path)
    return [{k: v for k, v in row.values.items() if v is not None} for row in read_data_rows(file, kind)]


PROMPTS = {
    "calls": [
        {"prompt": asked("weather", city="Paris"), "answer": "1"},
        {"prompt": asked("add", a="1"), "answer": "2"},
    ],
    "keys": [
        {"prompt": "a", "answer": {"t": "1"}, "m": {"k": ["x"]}},
        {"prompt": "b", "answer": {"u": "2"}, "m": {"l": 1}},
    ],
    "types": [{"prompt": "a", "answer": 1, "m": {}}, {"prompt": "b", "answer": "x", "m": {}}],
}


@pytest.mark.parametrize("how", [*FILES, *PROGRAMS, "prepare"])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_have_their_own_keys_and_types_from_every_kind(tmp_path, how, name):
    if name == "types" and how not in ANY_TYPES:
        return
    rows = PROMPTS[name]
    found = read(how, rows, "prompts", tmp_path)
    assert [row["prompt"] for row in found] == [r["prompt"] if name == "calls" else user(r["prompt"]) for r in rows]
    truths = [row["reward_model"]["ground_truth"] for row in found]
    assert repr(truths) == repr([row["answer"] for row in rows])
    assert [row["extra_info"].get("m") for row in found] == [row.get("m") for row in rows]


WHOLE = {"chosen": user("q") + said("good"), "rejected": user("q") + said("bad")}
PAIRS = {
    "texts": {"prompt": "q", "chosen": "good", "rejected": "bad"},
    "messages": {"prompt": user("q"), "chosen": said("good"), "rejected": said("bad")},
    "implicit texts": {"chosen": "q good", "rejected": "q bad"},
    "implicit messages": WHOLE,
    "whole": {"prompt": user("q"), **WHOLE},
    "whole with a text": {"prompt": "q", **WHOLE},
}


@pytest.mark.parametrize("how", [*FILES, *PROGRAMS])
def test_pairs_of_every_shape_are_read_from_every_kind(tmp_path, how):
    for name, row in PAIRS.items():
        (tmp_path / name).mkdir()
        (found,) = read(how, [row], "pairs", tmp_path / name)
        answers = {side: found[side].removeprefix(" " if name == "implicit texts" else "") for side in WHOLE}
        assert (found["prompt"], answers) == (user("q"), {"chosen": "good", "rejected": "bad"}), name


SHARED = [
    {"from": "human", "value": "hi"},
    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    {"from": "observation", "value": "1"},
    {"from": "gpt", "value": "yo"},
]


@pytest.mark.parametrize("how", [*FILES, *PROGRAMS])
def test_conversations_of_sharegpt_are_messages(tmp_path, how):
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    row = {"conversations": SHARED, "system": "be", "tools": json.dumps([function])}
    (found,) = read(how, [row], "examples", tmp_path)
    roles = [message["role"] for message in found["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert found["messages"][2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert json.loads(found["tools"]) == [{"type": "function", "function": function}]
    (of_trl,) = read(how, [{"prompt": user("q"), "completion": said("r")}], "examples", tmp_path)
    assert of_trl == {"prompt": user("q"), "response": "r"}


@pytest.mark.parametrize("how", [*FILES, *PROGRAMS])
def test_a_column_ground_truth_is_the_answer_where_there_is_none(tmp_path, how):
    (found,) = read(how, [{"prompt": "q", "ground_truth": "1"}], "prompts", tmp_path)
    assert found["reward_model"]["ground_truth"] == "1"
    assert "ground_truth" not in found["extra_info"]
    (found,) = read(how, [{"prompt": "q", "ground_truth": "1", "answer": "2"}], "prompts", tmp_path)
    assert (found["reward_model"]["ground_truth"], found["extra_info"]["ground_truth"]) == ("2", "1")


def test_sharegpt_is_a_prompt_or_a_pair_where_it_ends_before_the_answer(tmp_path):
    human, answer = SHARED[0], SHARED[-1]
    (found,) = read("jsonl", [{"conversations": [human], "answer": "1"}], "prompts", tmp_path)
    assert found["prompt"] == user("hi")
    pair = {"conversations": [human], "chosen": answer, "rejected": {"from": "gpt", "value": "no"}}
    assert read("jsonl", [pair], "pairs", tmp_path) == [{"prompt": user("hi"), "chosen": "yo", "rejected": "no"}]


# Values


MISSING = {
    "None": lambda: None,
    "NaN": lambda: float("nan"),
    "NaT": lambda: pandas().NaT,
    "NA": lambda: pandas().NA,
    "NaT of numpy": lambda: np.datetime64("NaT"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_value_is_none_or_an_error_that_names_its_row(tmp_path, name):
    missing = MISSING[name]()
    rows = [
        {"prompt": "a", "answer": "1", "more": 1, "deep": [{"k": 1}]},
        {"prompt": "b", "answer": "2", "more": missing},
    ]
    for how in ("list", "pandas"):
        assert read(how, rows, "prompts", tmp_path)[1]["extra_info"]["more"] is None
        for column in ("prompt", "answer"):
            with pytest.raises(DataError, match=f"^rows: row 1: '{column}' is empty; give it a value"):
                read(how, [rows[0], {**rows[1], column: missing}], "prompts", tmp_path)
    (row,) = read("list", [{"prompt": "a", "deep": [{"k": missing}]}], "prompts", tmp_path)
    assert row["extra_info"]["deep"] == [{"k": None}]


def test_a_null_that_a_row_has_stays_where_its_kind_can_say_so(tmp_path):
    rows = [{"prompt": "a", "m": {"k": None, "l": 1}}, {"prompt": "b", "m": {"j": 2}}]
    for how in ("jsonl", "json", "list"):
        assert [row["extra_info"]["m"] for row in read(how, rows, "prompts", tmp_path)] == [row["m"] for row in rows]
    assert read("parquet", rows, "prompts", tmp_path)[0]["extra_info"]["m"] == {"l": 1}
    texts = pa.array(['{"k": null}', None])
    table = pa.table({"prompt": ["a", "b"], "m": pa.ExtensionArray.from_storage(pa.json_(), texts)})
    pq.write_table(table, tmp_path / "json.parquet")
    for found in (
        read_data_rows(tmp_path / "json.parquet", "prompts"),
        read_data_rows(of_program(table, "prompts", tmp_path), "prompts"),
    ):
        assert [row.values["extra_info"]["m"] for row in found] == [{"k": None}, None]


def test_times_bytes_and_arrays_of_a_program_arrive_as_values_of_python(tmp_path):
    when = datetime.datetime(2024, 1, 2, 3, 4, 5, 6)
    values = {
        "times": (when, pandas().Timestamp(when), np.datetime64(when, "ns")),
        "more": (when.date(), when.time(), datetime.timedelta(1, 2, 3), Decimal("1.50"), b"\x00\xff", 2**80),
        "arrays": (np.array([[1, 2]]), np.float32(1.5), np.array([{"a": 1}], dtype=object), np.str_("é")),
    }
    expected = {"times": [when] * 3, "more": list(values["more"]), "arrays": [[[1, 2]], 1.5, [{"a": 1}], "é"]}
    for more in ({}, {"other": {}}):  # as columns of Arrow, and of JSON
        (row,) = read("list", [{"prompt": "a", **values, **more}], "prompts", tmp_path)
        assert repr({name: row["extra_info"][name] for name in values}) == repr(expected)
    table = pandas().DataFrame(
        [{"prompt": "a", "when": pandas().Timestamp(when)}, {"prompt": "b", "when": pandas().NaT}]
    )
    found = read_data_rows(of_program(table, "prompts", tmp_path), "prompts")
    assert [row.values["extra_info"]["when"] for row in found] == [when, None]


# Text files


@pytest.mark.parametrize(
    ("name", "data", "num_rows"),
    [
        ("a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n', 2),
        ("a.json", b'\xef\xbb\xbf[{"prompt": "a"}]', 1),
        ("b.json", b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}', 2),
        ("a.csv", b"\xef\xbb\xbfprompt\r\na\r\n\r\nb\r\n", 2),
        ("b.csv", b"prompt\n" + b"x" * 200_000 + b"\n", 1),
        ("c.csv", b"\n\nprompt,answer\na,1\n", 1),
    ],
)
def test_marks_line_ends_and_long_fields_of_text_files_are_read(tmp_path, name, data, num_rows):
    (tmp_path / name).write_bytes(data)
    assert len(read_data_rows(tmp_path / name, "prompts")) == num_rows


HALF = '"\\ud83d"'
ERRORS = [
    # name, contents, kind, what the error says
    ("a.jsonl", '{"prompt": "a"}\n{"prompt": "a", "x": [{"y": ' + HALF + "}]}", "prompts",
     r"line 2: column 'x': the text '.ud83d' is not valid Unicode"),
    ("b.jsonl", '{"prompt": "a"}\n{"prompt": "a", "x": {' + HALF + ": 1}}", "prompts", "line 2: column 'x': the text"),
    ("a.json", '[{"prompt": "a"}, {"prompt": ' + HALF + "}]", "prompts", "row 1: column 'prompt': the text"),
    ("b.json", '[{"prompt": "a", "prompt": "b"}]', "prompts", "is not JSON: key 'prompt' occurs twice"),
    ("a.csv", "prompt,prompt\na,b\n", "prompts", "there are 2 columns named 'prompt'; remove all but one"),
    ("b.csv", "prompt;answer\na;1\n", "prompts", "its fields are separated by ';'; save the file with commas"),
    ("c.csv", "prompt, answer\na, 1\n", "prompts", "the column ' answer' has spaces around its name; remove them"),
    ("d.csv", b"prompt\na\n\xff\n", "prompts", "line 3 is not UTF-8; save the file as UTF-8"),
    ("c.json", b'[{"prompt": "a"},\n{"prompt": "\xff"}]', "prompts", "line 2 is not UTF-8; save the file as UTF-8"),
    ("d.json", "", "prompts", "the file has no rows"),
    ("c.jsonl", '[{"prompt": "a"}]', "prompts", r"line 1: is a list; .*; a file of one list has the suffix \.json\."),
    ("d.jsonl", [{"chosen": "b", "rejected": "c"}], "pairs", "line 1: 'prompt' is missing or empty, and 'chosen' and"),
    ("e.jsonl", [{"chosen": user("a") + said("x"), "rejected": user("b") + said("y")}], "pairs",
     "line 1: the messages before the answers in 'chosen' and 'rejected' differ"),
    ("f.jsonl", [{"prompt": "z", **WHOLE}], "pairs",
     r"line 1: the messages before the answer in 'chosen', .* prompt, 'z'"),
    ("g.jsonl", [{"prompt": "q", "chosen": said("", tool_calls=[{}]), "rejected": "b"}], "pairs",
     "line 1: the answer in 'chosen' has tool_calls="),
    ("h.jsonl", [{"conversations": [{"from": "alien", "value": "x"}]}], "examples",
     "line 1: message 0 is from 'alien'; expected one of human, user, gpt,"),
    ("h.json", [{"conversations": [{"from": ["human"], "value": "x"}]}], "examples",
     r"row 0: message 0 is from \['human'\]; expected one of human,"),
    ("i.jsonl", [{"conversations": [{"from": "function_call", "value": "f(x)"}]}], "examples",
     "line 1: message 0 is from 'function_call', but is not the JSON of a call: 'f"),
    ("j.jsonl", [{"prompt": "a", "data_source": None}], "prompts", "line 1: 'data_source' is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "kind", "message"), ERRORS, ids=[case[0] for case in ERRORS])
def test_an_error_names_the_row_and_what_is_wrong(tmp_path, name, rows, kind, message):
    if isinstance(rows, str | bytes):
        (tmp_path / name).write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    else:
        write_rows(tmp_path / name, rows)
    with pytest.raises(DataError, match=message) as error:
        read_data_rows(tmp_path / name, kind)
    assert str(error.value).startswith(f"{tmp_path}/{name}: ")


def test_values_of_a_program_that_cannot_be_kept_are_named():
    for value, problem in (({1}, "has a value of the type set; expected texts,"), ({1: 2}, "has the key 1; keys in")):
        with pytest.raises(DataError, match=f"^rows: row 1: column 'more' {problem}"):
            records_of([{"prompt": "a"}, {"prompt": "b", "more": value}], "rows", 0, "")
    with pytest.raises(DataError, match="rows: there are 2 columns named 'prompt'; remove all but one"):
        records_of(pandas().DataFrame([["a", "b"]], columns=["prompt", "prompt"]), "rows", 0, "")


def test_a_text_of_a_table_that_is_not_utf_8_is_named_by_its_row(tmp_path):
    texts = pa.array([b"ok", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": texts}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: row 1: a value cannot be read \(UnicodeDecodeError"):
        read_data_rows(tmp_path / "a.parquet", "prompts")


def test_rare_types_of_arrow_are_plain_values_or_an_error_with_the_row(tmp_path):
    def read(values):
        pq.write_table(pa.table({"prompt": ["a", "b"], "x": values}), tmp_path / "a.parquet")
        return [row.values["extra_info"]["x"] for row in read_data_rows(tmp_path / "a.parquet", "prompts")]

    texts = pa.array(["NaN", '{"a": null}'])
    assert read(pa.ExtensionArray.from_storage(pa.json_(), texts)) == [None, {"a": None}]
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None], pa.binary(16)))
    assert read(uuids) == ["30303030-3030-3030-3030-303030303030", None]
    assert values_of(pa.RunEndEncodedArray.from_arrays([2], [1.5])) == [1.5, 1.5]
    assert values_of(pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((2, 1)))) == [[1.0], [1.0]]
    for kind, pairs in ((pa.map_(pa.int64(), pa.int8()), [(1, 1)]), (pa.map_(pa.string(), pa.int8()), [("a", 1)] * 2)):
        with pytest.raises(DataError, match=r"a\.parquet: row [01]: a value cannot be read \("):
            read(pa.array([[], pairs], kind))


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("prompts", {"id": 1, "problem": "a", "answer": "b"}),
        ("prompts", {"question": "a", "answer": "b"}),
        ("prompts", {"messages": user("a"), "answer": "b"}),
        ("examples", {"question": "a", "answer": "b"}),
        ("examples", {"chat": SHARED}),
        ("pairs", {"question": "q", "good": "a", "bad": "b"}),
    ],
)
def test_the_columns_that_an_error_proposes_are_read(tmp_path, kind, row):
    file = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=r"Name the columns in data\.columns, as in \{") as error:
        read_data_rows(file, kind)
    (proposed,) = re.findall(r"as in \{(.*?)\}", str(error.value))
    assert len(read_data_rows(file, kind, RowForm(dict(re.findall(r"(\w+) = '(.*?)'", proposed))))) == 1


def test_the_function_that_an_error_proposes_is_read(tmp_path):
    (tmp_path / "own.py").write_text(
        "def form(row):\n    *prompt, a = row['conversations']\n    return {'prompt': prompt, 'answer': a['value']}\n"
    )
    file = write_rows(tmp_path / "a.jsonl", [{"conversations": [SHARED[0], SHARED[-1]]}])
    with pytest.raises(DataError, match=r"'conversations' ends with an answer, .* with data\.map"):
        read_data_rows(file, "prompts")
    (row,) = read_data_rows(file, "prompts", RowForm(map=f"{tmp_path}/own.py:form"))
    assert (row.values["prompt"], row.values["reward_model"]["ground_truth"]) == (user("hi"), "yo")
