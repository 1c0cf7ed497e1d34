"""Damaged and hostile data files, one line each: the file, and the error of the function that reads it."""

import json
import os
import re
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.cli.main import main
from hybridflow.data import RLHFDataset, load_tokenizer, prepare_files
from hybridflow.errors import DataError

LONGEST_LINE = 1000
"""Characters of an error line, whatever the input was."""

TRUTH = {"style": "rule", "ground_truth": "1"}
GOOD = {"prompt": [{"role": "user", "content": "w3"}], "data_source": "countdown", "reward_model": TRUTH}


def column(name, values):
    """Return a writer of a file of good rows, one column of which is replaced by a function's array."""

    def write(path):
        array = values()
        table = pa.table({key: pa.array([value]).take(zeros(len(array))) for key, value in GOOD.items()})
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
        pq.write_table(pa.Table.from_pylist([GOOD]), path)
        path.write_bytes(change(path.read_bytes()))

    return write


def deep(path):
    value, kind = 1, pa.int8()
    for _ in range(200):
        value, kind = [value], pa.list_(kind)
    pq.write_table(pa.table({"prompt": pa.array([value], kind), "data_source": ["a"], "reward_model": ["a"]}), path)


def twice(path):
    table = pa.Table.from_pylist([GOOD])
    pq.write_table(table.append_column("prompt", table["prompt"]), path)


def struct_with_a_name_twice(path):
    messages = pa.StructArray.from_arrays([pa.array(["user"]), pa.array(["w3"])], ["role", "role"])
    column("prompt", lambda: pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), messages))(path)


def footer(data):
    return int.from_bytes(data[-8:-4], "little") + 8


FILES = [
    # name, writer, what the error says
    ("no bytes", contents(b""), r"not a readable parquet file \(Parquet file size is 0 bytes\)"),
    ("without its data", damaged(lambda d: d[:4] + d[-footer(d) :]), r"not a readable parquet file"),
    ("a footer of 2 GB", damaged(lambda d: d[:-8] + b"\xff\xff\xff\x7fPAR1"), r"not a readable parquet file"),
    ("a column twice", twice, r"there are 2 columns named 'prompt'; remove all but one"),
    ("a list of depth 200", deep, r"not a readable parquet file \(Parquet schema too deeply nested"),
    (
        "a field twice",
        struct_with_a_name_twice,
        r"a value cannot be read \(ValueError: an object has a key twice, of role, role",
    ),
    (
        "a text that is not UTF-8",
        column("data_source", lambda: pa.array([b"\xff\xfe"]).view(pa.string())),
        r"a value cannot be read \(UnicodeDecodeError",
    ),
]
PATHS = [
    # name, maker of the path, what the error says
    ("missing", lambda path: None, r"no such file\.$"),
    ("a folder", lambda path: path.mkdir(), r"; expected a file\.$|; name a file\.$"),
    ("a pipe", os.mkfifo, r"is a pipe, device or socket; expected a file\.$"),
    ("a device", lambda path: path.symlink_to("/dev/zero"), r"is a pipe, device or socket; expected a file\.$"),
    ("a link to itself", lambda path: path.symlink_to(path.name), r"cannot be opened: Too many levels of symbolic"),
    ("a link to nothing", lambda path: path.symlink_to("absent"), r"no such file\.$"),
    ("an unreadable file", lambda path: (path.touch(), path.chmod(0)), r"Permission denied"),
]
NAMES = [
    # the path, what the error says
    ("d" * 5000 + ".parquet", r"cannot be opened: File name too long\.$"),
    ("/dev/null/a.parquet", r"cannot be opened: Not a directory\.$"),
    ("", r"is not a folder of `Dataset\.save_to_disk`, .*; name a file\.$"),
    ("a.jsonl", r"no such file\.$"),
]

LINE = {"question": "6 * 7?", "answer": "#### 42"}
GOOD_LINE = json.dumps(LINE).encode() + b"\n"
LINES = [
    # name, contents after a good line, what the error says
    ("not JSON", b"{", r"line 2: is not JSON: Expecting property name"),
    ("not UTF-8", b'{"question": "\xff"}', r"line 2: byte 14 is not UTF-8; save the file as UTF-8"),
    ("deep nesting", b"[" * 100_000, r"line 2: is not JSON: values are nested too deeply"),
    ("an integer of 5,000 digits", b'{"question": ' + b"9" * 5000 + b"}", r"line 2: is not JSON: Exceeds the limit"),
    ("NaN", b'{"question": NaN}', r"line 2: is not JSON: NaN is not a number of JSON"),
    ("a key twice", b'{"question": "a", "question": "b"}', r"line 2: is not JSON: key 'question' occurs twice"),
    ("a list", b"[1]", r"line 2: is a list; expected an object with question and answer"),
]


@pytest.fixture
def read(tiny_model):
    """Return the function that reads the prompts of a run."""
    tokenizer = load_tokenizer(tiny_model("llama"))
    return lambda path: RLHFDataset([str(path)], tokenizer, max_prompt_length=8)


def error_of(function, *arguments):
    """Return the error of a function, one line, which must come soon."""
    start = time.process_time()
    with pytest.raises(DataError) as error:
        function(*arguments)
    assert time.process_time() - start < 60
    assert "\n" not in str(error.value)
    assert len(str(error.value)) <= LONGEST_LINE
    return str(error.value)


@pytest.mark.parametrize(("write", "message"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_a_bad_parquet_file_is_one_error(read, tmp_path, write, message):
    file = tmp_path / "bad.parquet"
    write(file)
    error = error_of(read, file)
    assert re.search(message, error), error
    assert str(file) in error


@pytest.mark.usefixtures("obeys_modes")
@pytest.mark.parametrize(("make", "message"), [case[1:] for case in PATHS], ids=[case[0] for case in PATHS])
def test_a_path_that_is_not_a_file_is_one_error(read, tmp_path, make, message):
    for name in ("bad.parquet", "bad.jsonl"):
        make(tmp_path / name)
    for function, arguments in (
        (read, [tmp_path / "bad.parquet"]),
        (prepare_files, ["gsm8k", tmp_path / "bad.jsonl", tmp_path / "out"]),
    ):
        error = error_of(function, *arguments)
        assert re.search(message, error), error


@pytest.mark.parametrize(("name", "message"), NAMES, ids=range(len(NAMES)))
def test_a_name_that_cannot_be_opened_is_one_error(read, name, message):
    assert re.search(message, error_of(read, name))


@pytest.mark.parametrize(("data", "message"), [case[1:] for case in LINES], ids=[case[0] for case in LINES])
def test_a_bad_json_line_is_one_error(read, tmp_path, data, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(GOOD_LINE + data)
    error = error_of(prepare_files, "gsm8k", file, tmp_path / "out")
    assert re.search(message, error), error
    assert error.startswith(f"{file}: line 2: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a": 1', b"\xff", GOOD_LINE, b'{"k": 1}'], ids=range(5))
def test_a_bad_json_line_of_prompts_is_one_error(read, tmp_path, data):
    file = tmp_path / "data.jsonl"
    file.write_bytes(data)
    assert error_of(read, file).startswith(f"{file}: line 1: ")


@pytest.mark.parametrize(
    ("write", "status", "message"),
    [
        (contents(b"PAR1"), 1, r"not a readable parquet file"),
        (lambda path: path.mkdir(), 2, r"; expected a file\.$|; name a file\.$"),
    ],
)
def test_the_command_shows_one_error(tiny_model, tmp_path, capsys, write, status, message):
    write(tmp_path / "bad.parquet")
    file = json.dumps([str(tmp_path / "bad.parquet")])
    assert main(["evaluate", f"model.path={tiny_model('llama')}", f"data.val_files={file}"]) == status
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("error: ") == 1
    assert re.search(message, error.splitlines()[-1]), error
