"""Damaged and hostile data files, one line each: the file, the first line of the error, and the exit status."""

import json
import os
import re
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.cli.main import main

pytestmark = pytest.mark.slow

LONGEST_LINE = 1000
"""Characters of an error line, whatever the input was."""

DATA, USAGE = 1, 2
"""Exit statuses: of bad contents, and of a path that is not a file."""

MEGABYTE = "x" * 2**20


def good_row():
    return {
        "prompt": [{"role": "user", "content": "w3"}],
        "data_source": "countdown",
        "reward_model": {"style": "rule", "ground_truth": "1"},
    }


def rows(*changes):
    """Return a writer of a file whose rows are a good one with these changes."""
    return lambda path: pq.write_table(pa.Table.from_pylist([good_row() | change for change in changes]), path)


def column(name, values):
    """Return a writer of a file of good rows, one column of which is replaced by a function's array."""

    def write(path):
        array = values()
        table = pa.table({key: pa.array([value]).take(zeros(len(array))) for key, value in good_row().items()})
        table = table.set_column(table.column_names.index(name), name, array)
        pq.write_table(table, path, store_schema=False, compression="zstd")

    return write


def zeros(count):
    return pa.array(memoryview(bytes(4 * count)).cast("i"))


def contents(data):
    """Return a writer of these bytes."""
    return lambda path: path.write_bytes(data)


def damaged(change):
    """Return a writer of a good file whose bytes a function has changed."""

    def write(path):
        rows({})(path)
        path.write_bytes(change(path.read_bytes()))

    return write


def nulls_in_one_list():
    count = 100_000_001
    return pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count, pa.int8()))


def repeated_message():
    """Return 100,000 rows of one message of a megabyte, which a dictionary holds once."""
    text = pa.DictionaryArray.from_arrays(zeros(100_000), [MEGABYTE])
    role = pa.DictionaryArray.from_arrays(zeros(100_000), ["user"])
    messages = pa.StructArray.from_arrays([role, text], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(range(100_001), pa.int32()), messages)


def repeated_text():
    return pa.DictionaryArray.from_arrays(zeros(100_000), [MEGABYTE])


def nulls(count):
    """Return a writer of a file of rows without values, which takes some kilobytes."""
    return lambda path: pq.write_table(pa.table({key: pa.nulls(count) for key in good_row()}), path)


def many_columns(path):
    pq.write_table(pa.table({f"c{number}": pa.array([1]) for number in range(10_001)}), path)


def deep(depth):
    """Return a writer of a prompt that is lists in lists."""

    def write(path):
        value, kind = 1, pa.int8()
        for _ in range(depth):
            value, kind = [value], pa.list_(kind)
        table = pa.table({key: [item] for key, item in good_row().items()})
        pq.write_table(table.set_column(0, "prompt", pa.array([value], kind)), path)

    return write


def twice(path):
    table = pa.Table.from_pylist([good_row()])
    pq.write_table(table.append_column("prompt", table["prompt"]), path)


def struct_with_a_name_twice(path):
    messages = pa.StructArray.from_arrays([pa.array(["user"]), pa.array(["w3"])], ["role", "role"])
    column("prompt", lambda: pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), messages))(path)


def not_utf8():
    return pa.array([b"\xff\xfe"]).view(pa.string())


FILES = [
    # name, writer, status, what the error says
    ("no bytes", contents(b""), DATA, r"not a readable parquet file \(Parquet file size is 0 bytes\)"),
    (
        "text",
        contents(b"prompt,data_source\n" * 9),
        DATA,
        r"not a readable parquet file \(Parquet magic bytes not found",
    ),
    ("zeros", contents(bytes(10_000)), DATA, r"not a readable parquet file \(Parquet magic"),
    ("random bytes", contents(bytes(range(256)) * 9), DATA, r"not a readable parquet file"),
    ("magic alone", contents(b"PAR1"), DATA, r"not a readable parquet file"),
    ("magic twice", contents(b"PAR1" * 2), DATA, r"not a readable parquet file"),
    ("without its last byte", damaged(lambda d: d[:-1]), DATA, r"not a readable parquet file \(Parquet magic"),
    ("half", damaged(lambda d: d[: len(d) // 2]), DATA, r"not a readable parquet file"),
    ("without its start", damaged(lambda d: d[len(d) // 2 :]), DATA, r"not a readable parquet file"),
    ("without its data", damaged(lambda d: d[:4] + d[-footer(d) :]), DATA, r"not a readable parquet file"),
    ("data of zeros", damaged(lambda d: d[:4] + bytes(len(d) - 4 - footer(d)) + d[-footer(d) :]), DATA, r"not a read"),
    ("a footer of 2 GB", damaged(lambda d: d[:-8] + b"\xff\xff\xff\x7fPAR1"), DATA, r"not a readable parquet file"),
    ("a footer of zeros", damaged(lambda d: bytes(len(d) - 8) + d[-8:]), DATA, r"not a readable parquet file"),
    ("encrypted", damaged(lambda d: b"PARE" + d[4:-4] + b"PARE"), DATA, r"not a readable parquet file"),
    ("Arrow, not parquet", contents(b"ARROW1\0\0" * 9), DATA, r"not a readable parquet file"),
    ("compressed by gzip", contents(b"\x1f\x8b\x08" + bytes(99)), DATA, r"not a readable parquet file"),
    (
        "no rows",
        lambda path: pq.write_table(pa.Table.from_pylist([good_row()]).slice(0, 0), path),
        DATA,
        r"has no rows",
    ),
    (
        "30 million nulls",
        nulls(30_000_000),
        DATA,
        r"has 30,000,000 rows; at ",
    ),
    ("nine million nulls", nulls(9_000_000), DATA, r"row 0: column 'prompt' has no value"),
    ("100 million nulls in a row", column("prompt", nulls_in_one_list), DATA, r"has 100,000,001 values; at most 100,0"),
    ("100 GB by a dictionary", column("data_source", repeated_text), DATA, r"'data_source' has [\d.]+ GiB uncompresse"),
    (
        "the same in a message",
        column("prompt", repeated_message),
        DATA,
        r"column 'prompt.list.element.content' has [\d.]+",
    ),
    ("10,001 columns", many_columns, DATA, r"the file has 10,001 columns; at most 10,000\. Split the file"),
    ("a column twice", twice, DATA, r"there are 2 columns named 'prompt'; remove all but one"),
    ("a list of depth 200", deep(200), DATA, r"not a readable parquet file \(Parquet schema too deeply nested"),
    ("a list of depth 30", deep(30), DATA, r"row 0: message 0 of 'prompt' needs a role and a content, got \[\["),
    ("a field twice", struct_with_a_name_twice, DATA, r"a value cannot be read \(ValueError: .*duplicate field names"),
    ("a text that is not UTF-8", column("data_source", not_utf8), DATA, r"a value cannot be read \(UnicodeDecodeError"),
    (
        "no prompt column",
        lambda path: pq.write_table(pa.table({"text": ["a"]}), path),
        DATA,
        r"'prompt' is missing; the f",
    ),
    (
        "no column",
        lambda path: pq.write_table(pa.table({}), path),
        DATA,
        r"'prompt' is missing; the file has no columns",
    ),
    (
        "a column of 10,000 characters",
        lambda path: pq.write_table(pa.table({"a" * 10_000: [1]}), path),
        DATA,
        r"missing",
    ),
    ("prompts of texts", rows({"prompt": "w3"}), DATA, r"row 0: column 'prompt' must be a list of chat messages"),
    ("prompts of numbers", rows({"prompt": 3}), DATA, r"row 0: column 'prompt' must be a list of chat messages"),
    ("no message", rows({}, {"prompt": []}), DATA, r"row 1: column 'prompt' has no messages"),
    ("a null prompt", rows({}, {"prompt": None}), DATA, r"row 1: column 'prompt' has no value \(null\)"),
    ("a null source", rows({}, {"data_source": None}), DATA, r"row 1: column 'data_source' has no value \(null\)"),
    ("a source of numbers", rows({"data_source": 3}), DATA, r"row 0: column 'data_source' must be a text, got 3"),
    (
        "a null truth",
        rows({"reward_model": {"style": "rule", "ground_truth": None}}),
        DATA,
        r"must hold style and ground",
    ),
    (
        "a truth without its table",
        rows({"reward_model": "1"}),
        DATA,
        r"column 'reward_model' must hold style and ground",
    ),
    ("a message without a role", rows({"prompt": [{"content": "w3"}]}), DATA, r"message 0 of 'prompt' needs a role"),
    ("a message of a number", rows({"prompt": [{"role": "user", "content": 3}]}), DATA, r"must be a text, got 3"),
    ("images", rows({"images": [b"PNG"]}), DATA, r"row 0: column 'images' holds data, but prompts with images"),
    (
        "an unknown source",
        rows({"data_source": "evil"}),
        USAGE,
        r"no built-in reward function serves data_source 'evil'",
    ),
]


def footer(data):
    return int.from_bytes(data[-8:-4], "little") + 8


def make_loop(path):
    path.symlink_to(path.name)


PATHS = [
    # name, maker of the path, what the error says
    ("missing", lambda path: None, r"no such file\.$"),
    ("a folder", lambda path: path.mkdir(), r"; expected a file\.$|; name a file\.$"),
    ("a pipe", os.mkfifo, r"is a pipe, device or socket; expected a file\.$"),
    ("a device", lambda path: path.symlink_to("/dev/zero"), r"is a pipe, device or socket; expected a file\.$"),
    ("a link to itself", make_loop, r"cannot be opened: Too many levels of symbolic links\.$"),
    ("a link to nothing", lambda path: path.symlink_to("absent"), r"no such file\.$"),
]

NAMES = [
    ("a name of 5,000 characters", "d" * 5000 + ".parquet", r"cannot be opened: File name too long\.$"),
    ("a file as a folder", "/dev/null/a.parquet", r"cannot be opened: Not a directory\.$"),
    ("an empty name", "", r"is not a folder of `Dataset\.save_to_disk`, .*; name a file\.$"),
    ("JSON lines", "a.jsonl", r"no such file\.$"),
]

LINE = {"question": "6 * 7?", "answer": "#### 42"}
GOOD_LINE = json.dumps(LINE).encode() + b"\n"
LINES = [
    # name, contents after a good line, what the error says
    ("not JSON", b"{", r"line 2: is not JSON: Expecting property name"),
    ("Python, not JSON", b"{'question': 1}", r"line 2: is not JSON"),
    ("cut off", GOOD_LINE[:20], r"line 2: is not JSON: Unterminated string"),
    ("not UTF-8", b'{"question": "\xff"}', r"line 2: byte 14 is not UTF-8; save the file as UTF-8"),
    ("UTF-16", GOOD_LINE.decode().encode("utf-16"), r"line 2: byte 0 is not UTF-8"),
    ("NUL bytes", bytes(100), r"line 2: is not JSON"),
    ("a NUL in a text", b'{"question": "\0"}', r"line 2: is not JSON: Invalid control character"),
    ("deep nesting", b"[" * 100_000, r"line 2: is not JSON: values are nested too deeply"),
    ("deep objects", b'{"a":' * 100_000, r"line 2: is not JSON: values are nested too deeply"),
    ("an integer of 5,000 digits", b'{"question": ' + b"9" * 5000 + b"}", r"line 2: is not JSON: Exceeds the limit"),
    ("NaN", b'{"question": NaN}', r"line 2: is not JSON: NaN is not a number of JSON"),
    ("infinity", b'{"a": -Infinity}', r"line 2: is not JSON: -Infinity is not a number of JSON"),
    ("a key twice", b'{"question": "a", "question": "b"}', r"line 2: is not JSON: key 'question' occurs twice"),
    ("a list", b"[1]", r"line 2: is a list; expected an object with question and answer"),
    ("a number", b"3", r"line 2: is a int; expected an object"),
    ("null", b"null", r"line 2: is a NoneType; expected an object"),
    ("an empty object", b"{}", r"line 2: 'question' is missing; the row has no keys"),
    ("a number for the question", b'{"question": 3, "answer": "#### 1"}', r"line 2: 'question' must be a text, got 3"),
    ("no number in the answer", b'{"question": "a", "answer": "b"}', r"line 2: the answer must end in '#### number'"),
    ("a long wrong value", json.dumps({"question": [1] * 10**5}).encode(), r"'question' must be a text, got \[1, 1, 1"),
    (
        "10,000 keys",
        json.dumps({f"k{n}": n for n in range(10**4)}).encode(),
        r"'question' is missing; the row has k0",
    ),
    ("a line of 100 MB", b'{"question": "' + b"a" * 10**8 + b'"}', r"line 2: is longer than 16,777,216 bytes"),
    ("100 MB of blanks", b" " * 10**8, r"line 2: is longer than 16,777,216 bytes"),
    ("a second object in a line", GOOD_LINE.strip() * 2, r"line 2: is not JSON: Extra data"),
    ("a byte order mark", b"\xef\xbb\xbf" + GOOD_LINE, r"line 2: is not JSON: Unexpected UTF-8 BOM|Expecting value"),
]


@pytest.fixture
def error_of(capsys):
    """Return `error_of(arguments, status)`: the error line of a command, which must end soon and without traceback."""

    def run(arguments, status):
        start = time.process_time()
        assert main([str(argument) for argument in arguments]) == status
        assert time.process_time() - start < 60
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, error[-2000:]
        assert "Traceback" not in error
        assert error.rstrip().endswith(lines[0])  # one line
        assert len(lines[0]) <= LONGEST_LINE
        return lines[0]

    return run


def evaluate(model, file):
    return ["evaluate", f"model.path={model}", f"data.val_files={json.dumps([str(file)])}"]


@pytest.mark.parametrize(("write", "status", "message"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_a_bad_parquet_file_is_one_error(tiny_model, tmp_path, error_of, write, status, message):
    file = tmp_path / "bad.parquet"
    write(file)
    error = error_of(evaluate(tiny_model("llama"), file), status)
    assert re.search(message, error), error
    assert str(file) in error


def test_texts_that_repeat_their_prefix_are_counted_before_they_are_expanded(
    tiny_model, tmp_path, monkeypatch, error_of
):
    monkeypatch.setattr("hybridflow.data.parquet_bounds.MAX_BYTES", 2**29)
    file = tmp_path / "bad.parquet"
    table = pa.table({key: pa.array([value]).take(zeros(100)) for key, value in good_row().items()})
    texts = pa.array([MEGABYTE]).take(zeros(100))
    table = table.set_column(table.column_names.index("data_source"), "data_source", texts)
    encodings = {"data_source": "DELTA_BYTE_ARRAY"}
    with pq.ParquetWriter(file, table.schema, use_dictionary=False, column_encoding=encodings) as writer:
        for _ in range(20):
            writer.write_table(table)
    error = error_of(evaluate(tiny_model("llama"), file), DATA)
    assert re.search(r"column 'data_source' has 0\.\d GiB uncompressed; at most 0\.5 GiB", error), error


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in PATHS], ids=[case[0] for case in PATHS])
def test_a_path_that_is_not_a_file_is_one_error(tiny_model, tmp_path, error_of, make, message):
    for name in ("bad.parquet", "bad.jsonl"):
        make(tmp_path / name)
    files = [tmp_path / "bad.jsonl"] * 2
    for arguments in (
        evaluate(tiny_model("llama"), tmp_path / "bad.parquet"),
        ["generate", f"--model={tiny_model('llama')}", f"--prompts-file={tmp_path / 'bad.parquet'}"],
        ["prepare", "gsm8k", "--train-file", files[0], "--test-file", files[1], "--output-dir", tmp_path / "out"],
    ):
        error = error_of(arguments, USAGE)
        assert re.search(message, error), error


@pytest.mark.parametrize(("name", "message"), [case[1:] for case in NAMES], ids=[case[0] for case in NAMES])
def test_a_name_that_cannot_be_opened_is_one_error(tiny_model, error_of, name, message):
    error = error_of(evaluate(tiny_model("llama"), name), USAGE)
    assert re.search(message, error), error


@pytest.mark.usefixtures("obeys_modes")
def test_an_unreadable_file_is_one_error(tiny_model, tmp_path, error_of):
    rows({})(tmp_path / "secret.parquet")
    (tmp_path / "secret.jsonl").write_bytes(GOOD_LINE)
    for name in ("secret.parquet", "secret.jsonl"):
        (tmp_path / name).chmod(0)
    assert "Permission denied" in error_of(evaluate(tiny_model("llama"), tmp_path / "secret.parquet"), DATA)
    arguments = ["prepare", "gsm8k", *["--train-file", tmp_path / "secret.jsonl"], *["--test-file", "x.jsonl"]]
    assert "secret.jsonl: cannot be read: Permission denied" in error_of(arguments, DATA)


@pytest.mark.parametrize(("data", "message"), [case[1:] for case in LINES], ids=[case[0] for case in LINES])
def test_a_bad_json_line_is_one_error(tmp_path, error_of, data, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(GOOD_LINE + data)
    arguments = ["prepare", "gsm8k", "--train-file", file, "--test-file", file, "--output-dir", tmp_path / "out"]
    error = error_of(arguments, DATA)
    assert re.search(message, error), error
    assert error.startswith(f"error: {file}: line 2: ")
    assert not (tmp_path / "out").exists()


def test_bad_json_lines_as_prompts_are_one_error(tiny_model, tmp_path, error_of):
    file = tmp_path / "data.jsonl"
    for data in (b"[" * 100_000, b'{"a": 1', b"\xff", GOOD_LINE, json.dumps({"k" * 500: 1}).encode()):
        file.write_bytes(data)
        error = error_of(evaluate(tiny_model("llama"), file), DATA)
        assert error.startswith(f"error: {file}: line 1: ")
        assert len(error) < 2500


def test_the_python_of_these_tests_limits_digits_and_depth():
    assert sys.get_int_max_str_digits() == 4300
    assert sys.getrecursionlimit() <= 100_000
