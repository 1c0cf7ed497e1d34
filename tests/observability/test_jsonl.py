import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from hybridflow.errors import DataError
from hybridflow.observability import JsonlWriter, read_jsonl


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def test_row_is_one_line_of_json_in_the_given_order(path):
    writer = JsonlWriter(path)
    writer.log(1, {"b": 0.1, "a": "text é\n"})
    writer.write({"step": 2})
    assert path.read_text("utf-8") == '{"step": 1, "b": 0.1, "a": "text é\\n"}\n{"step": 2}\n'


def test_numbers_round_trip_exactly(path):
    values = [0.1 + 0.2, 1e-310, -0.0, 1.7976931348623157e308, 2**53 + 1]
    JsonlWriter(path).write({"values": values})
    assert read_jsonl(path)[0]["values"] == values


def test_numpy_and_torch_scalars_are_written_as_numbers(path):
    JsonlWriter(path).write({"a": np.float32(0.5), "b": torch.tensor(3), "c": np.int64(4), "d": np.bool_(True)})
    assert path.read_text() == '{"a": 0.5, "b": 3, "c": 4, "d": true}\n'


def test_non_finite_number_is_null_with_its_text_and_round_trips(path):
    JsonlWriter(path).log(3, {"x": math.nan, "y": -math.inf, "z": np.float32("inf"), "w": 1.0})
    assert json.loads(path.read_text()) == {
        "step": 3,
        "x": None,
        "y": None,
        "z": None,
        "w": 1.0,
        "non_finite": {"x": "nan", "y": "-inf", "z": "inf"},
    }
    (row,) = read_jsonl(path)
    assert math.isnan(row.pop("x"))
    assert row == {"step": 3, "y": -math.inf, "z": math.inf, "w": 1.0}


@pytest.mark.parametrize("value", [object(), torch.zeros(2), np.zeros(2), [math.nan], {1, 2}])
def test_value_that_json_lacks_raises_and_writes_nothing(path, value):
    writer = JsonlWriter(path)
    with pytest.raises(DataError, match="the row of step, x cannot be written as JSON"):
        writer.log(1, {"x": value})
    writer.log(1, {"x": 0})
    assert read_jsonl(path) == [{"step": 1, "x": 0}]


def test_second_writer_appends_to_the_file(path):
    JsonlWriter(path).log(1, {})
    JsonlWriter(path).log(2, {})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]


def test_incomplete_last_line_is_not_read_and_dropped_on_open(path):
    JsonlWriter(path).log(1, {"x": 1})
    whole = path.read_text()
    path.write_text(whole + '{"step": 2, "x": 0.3')
    assert read_jsonl(path) == [{"step": 1, "x": 1}]
    JsonlWriter(path).log(2, {"x": 4})
    assert path.read_text() == whole + '{"step": 2, "x": 4}\n'


def test_file_of_one_incomplete_line_is_emptied_on_open(path):
    path.parent.mkdir()
    path.write_text('{"st')
    JsonlWriter(path).log(1, {})
    assert path.read_text() == '{"step": 1}\n'


def test_rows_survive_sigkill(path):
    program = (
        "import os, sys\nfrom hybridflow.observability import JsonlWriter\n"
        "writer = JsonlWriter(sys.argv[1])\nwriter.log(1, {'x': 1})\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -9
    assert read_jsonl(path) == [{"step": 1, "x": 1}]


def test_truncate_after_drops_later_steps_and_keeps_other_bytes(path):
    writer = JsonlWriter(path)
    for step in (1, 2, 2, 3):
        writer.log(step, {"x": 1 / 3})
    lines = path.read_text().splitlines(keepends=True)
    assert writer.truncate_after(2) == {1, 2}
    assert path.read_text() == "".join(lines[:3])
    writer.log(3, {"x": 5})
    assert path.read_text() == "".join(lines[:3]) + '{"step": 3, "x": 5}\n'


def test_truncate_after_of_an_empty_file(path):
    writer = JsonlWriter(path)
    writer.truncate_after(3)
    assert read_jsonl(path) == []


def test_truncate_after_the_last_step_changes_nothing(path):
    writer = JsonlWriter(path)
    writer.log(1, {})
    writer.truncate_after(7)
    assert path.read_text() == '{"step": 1}\n'


def test_truncate_after_with_a_row_without_step_changes_nothing(path):
    writer = JsonlWriter(path)
    writer.log(1, {})
    writer.write({"x": 1})
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2: the row has no integer step"):
        writer.truncate_after(0)
    assert len(read_jsonl(path)) == 2
    writer.log(3, {})
    assert len(read_jsonl(path)) == 3


def test_missing_file_is_an_error(path):
    with pytest.raises(DataError, match=r"metrics.jsonl not found"):
        read_jsonl(path)


@pytest.mark.parametrize(
    ("line", "reason"), [("{broken", "not valid JSON"), ("[1]", "not a JSON object"), ("", "not valid JSON")]
)
def test_broken_line_raises_with_file_and_line(path, line, reason):
    path.parent.mkdir()
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"metrics.jsonl, line 2: .*{reason}"):
        read_jsonl(path)


def test_full_disk_raises_and_the_next_writer_drops_the_partial_row(small_disk):
    writer = JsonlWriter(small_disk / "metrics.jsonl")
    writer.log(1, {})
    with pytest.raises(DataError, match=r"metrics\.jsonl: \d+ characters could not be written: .*No space left"):
        writer.log(2, {"text": "x" * (2 << 20)})
    assert [row["step"] for row in read_jsonl(JsonlWriter(writer.path).path)] == [1]


def test_write_all_writes_no_row_if_one_is_invalid(path):
    writer = JsonlWriter(path)
    writer.write_all({"step": step} for step in (1, 2))
    with pytest.raises(DataError, match="cannot be written as JSON"):
        writer.write_all([{"step": 3}, {"step": 4, "x": object()}])
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]


def test_file_behind_a_link_is_not_cut(path, tmp_path):
    (tmp_path / "target").write_text("an incomplete line")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="is a symbolic link, not a regular file"):
        JsonlWriter(path)
    assert (tmp_path / "target").read_text() == "an incomplete line"
