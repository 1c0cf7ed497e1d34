import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import DataError
from hybridflow.runtime.observe import JsonlWriter, read_jsonl


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


VALUES = st.one_of(st.floats(), st.integers(-(2**70), 2**70), st.text(), st.booleans(), st.none())
ROWS = st.lists(st.dictionaries(st.text(min_size=1).filter(lambda name: name not in ("step", "non_finite")), VALUES))


@given(ROWS)
@settings(deadline=None, derandomize=True, max_examples=30)
def test_rows_round_trip_exactly_also_through_a_second_writer(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    for step, row in enumerate(rows):
        JsonlWriter(path).log(step, row)
    found = read_jsonl(path) if path.exists() else []
    assert list(map(repr, found)) == [repr({"step": step, **row}) for step, row in enumerate(rows)]


def test_a_row_is_one_line_of_json_in_the_given_order(path):
    writer = JsonlWriter(path)
    writer.log(1, {"b": 0.1, "a": "text é\n"})
    writer.write({"a": np.float32(0.5), "b": torch.tensor(3), "c": np.int64(4), "d": np.bool_(True)})
    writer.log(3, {"x": math.nan, "z": np.float32("inf"), "w": 1.0})
    assert path.read_text("utf-8").splitlines() == [
        '{"step": 1, "b": 0.1, "a": "text é\\n"}',
        '{"a": 0.5, "b": 3, "c": 4, "d": true}',
        '{"step": 3, "x": null, "z": null, "w": 1.0, "non_finite": {"x": "nan", "z": "inf"}}',
    ]


@pytest.mark.parametrize("value", [object(), torch.zeros(2), np.zeros(2), [math.nan], {1, 2}])
def test_value_that_json_lacks_raises_and_writes_nothing(path, value):
    writer = JsonlWriter(path)
    with pytest.raises(DataError, match="the row of step, x cannot be written as JSON"):
        writer.write({"step": 1, "x": value})
    with pytest.raises(DataError, match="cannot be written as JSON"):
        writer.write_all([{"step": 3}, {"step": 4, "x": value}])
    writer.write_all({"step": step} for step in (1, 2))
    writer.log(3, {"x": value, "y": 1.0})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}, {"step": 3, "x": f"<{type(value).__name__}>", "y": 1.0}]


def test_incomplete_last_line_is_not_read_and_dropped_on_open(path):
    for whole in ("", '{"step": 1, "x": 1}\n'):
        path.parent.mkdir(exist_ok=True)
        path.write_text(whole + '{"step": 2, "x": 0.3')
        assert len(read_jsonl(path)) == bool(whole)
        JsonlWriter(path).log(2, {"x": 4})
        assert path.read_text() == whole + '{"step": 2, "x": 4}\n'


@pytest.mark.runs
@pytest.mark.own_run("grpo: kills a process that writes a row")
def test_rows_survive_sigkill(path):
    program = (
        "import os, sys\nfrom hybridflow.runtime.observe import JsonlWriter\n"
        "writer = JsonlWriter(sys.argv[1])\nwriter.log(1, {'x': 1})\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -9
    assert read_jsonl(path) == [{"step": 1, "x": 1}]


@pytest.mark.parametrize(("last", "kept"), [(0, 0), (1, 1), (2, 3), (3, 4), (7, 4)])
def test_truncate_after_drops_later_steps_and_keeps_other_bytes(path, last, kept):
    writer = JsonlWriter(path)
    assert writer.truncate_after(3) == set()
    for step in (1, 2, 2, 3):
        writer.log(step, {"x": 1 / 3})
    lines = path.read_text().splitlines(keepends=True)
    assert writer.truncate_after(last) == {1, 2, 3} - set(range(last + 1, 4))
    writer.log(8, {"x": 5})
    assert path.read_text() == "".join(lines[:kept]) + '{"step": 8, "x": 5}\n'


def test_truncate_after_with_a_row_without_step_changes_nothing(path):
    writer = JsonlWriter(path)
    writer.log(1, {})
    writer.write({"x": 1})
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2: the row has no integer step"):
        writer.truncate_after(0)
    writer.log(3, {})
    assert len(read_jsonl(path)) == 3


@pytest.mark.parametrize(
    ("line", "reason"), [("{broken", "not valid JSON"), ("[1]", "not a JSON object"), ("", "not valid JSON")]
)
def test_broken_line_or_missing_file_raises_with_file_and_line(path, line, reason):
    with pytest.raises(DataError, match=r"metrics.jsonl not found"):
        read_jsonl(path)
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


def test_file_behind_a_link_is_not_cut(path, tmp_path):
    (tmp_path / "target").write_text("an incomplete line")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="is a symbolic link, not a regular file"):
        JsonlWriter(path)
    assert (tmp_path / "target").read_text() == "an incomplete line"
