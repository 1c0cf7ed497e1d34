"""The rows of runs: states, damage, and files that must not be followed, waited for or read whole."""

import fcntl
import json
import os

import pytest

from fixtures.report_runs import write_run
from hybridflow.cli.inspect.run_table import age, list_runs, run_row
from hybridflow.errors import DataError
from hybridflow.runtime.observe import jsonl
from hybridflow.runtime.observe.jsonl import read_last_rows


def set_start(run, **values):
    document = json.loads((run / "run.json").read_text())
    document["starts"][-1] |= values
    (run / "run.json").write_text(json.dumps(document))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=5)


def test_a_row_has_the_last_step_and_the_last_values(run):
    set_start(run, kind="train", total_steps=9)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(
            '{"step": 6, "critic/score/mean": 0.5, "val/score/mean": 0.25}\n{"step": 7, "critic/score/mean": 0.75}\n'
        )
    row = run_row(run)
    assert (row.kind, row.recipe, row.step, row.total_steps) == ("train", "recipe.toml", 7, 9)
    assert (row.figure, row.value) == ("critic/score/mean", 0.75)
    assert (row.val_figure, row.val_value) == ("val/score/mean", 0.25)
    assert row.started == 1767323045.0


@pytest.mark.parametrize(
    ("starts", "recipe"),
    [
        ([["train", "dapo", "sub/own.toml", "trainer.run_dir=x.toml"]], "dapo own.toml"),
        ([["train", "model.path=m"]], "defaults"),
        ([["train", "first.toml"], ["train", "runs/a/config.toml"]], "first.toml"),
        ([["train", "other/config.toml"]], "config.toml"),
        (["grpo"], "grpo"),
        (["defaults", "config.toml"], "defaults"),
        ([["--any"]], ""),
    ],
)
def test_the_recipe_is_that_of_a_command_or_of_a_python_program(run, starts, recipe):
    made = [{"recipe": each} if isinstance(each, str) else {"command": ["hybridflow", *each]} for each in starts]
    (run / "run.json").write_text(json.dumps({"starts": made}))
    assert run_row(run).recipe == recipe


def save(run, step, **sizes):
    directory = run / "checkpoints" / f"step_{step:06d}"
    directory.mkdir(parents=True)
    for name, size in sizes.items():
        (directory / name).write_bytes(bytes(size))
    return directory


def test_the_state_follows_from_lock_steps_and_checkpoint(run):
    set_start(run, total_steps=6)
    assert run_row(run).state == "failed"  # steps 1 to 5 are in no checkpoint
    save(run, 4)
    assert run_row(run).state == "failed"
    save(run, 5)
    assert run_row(run).state == "stopped"
    set_start(run, total_steps=5)
    assert run_row(run).state == "finished"
    lock = os.open(run / ".lock", os.O_CREAT | os.O_RDWR)
    assert run_row(run).state == "finished"
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # looking at a lock does not keep it
    assert run_row(run).state == "running"
    os.close(lock)
    assert run_row(run).state == "finished"


def test_a_run_that_ended_before_its_first_row_has_failed(run):
    (run / "metrics.jsonl").unlink()
    set_start(run, total_steps=6)
    row = run_row(run)
    assert (row.state, row.step, row.value, row.figure) == ("failed", 0, None, "")
    assert row.written == (run / "run.json").stat().st_mtime


def test_the_size_is_that_of_all_checkpoints_without_what_links_name(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "large").write_bytes(bytes(999))
    save(run, 3, actor=100, critic=10)
    shards = save(run, 5, actor=1) / "shards"
    shards.mkdir()
    (shards / "0").write_bytes(bytes(1000))
    (shards / "link").symlink_to(tmp_path / "elsewhere" / "large")
    (shards / "links").symlink_to(tmp_path / "elsewhere")
    (run / "checkpoints" / "step_000009").symlink_to(tmp_path / "elsewhere")
    (run / "checkpoints" / ".step_000006.tmp").mkdir()
    row = run_row(run)
    assert (row.checkpoint_bytes, row.checkpoint_step) == (1111, 5)
    (run / "checkpoints").rename(tmp_path / "other_disk")
    (run / "checkpoints").symlink_to(tmp_path / "other_disk")
    assert run_row(run).checkpoint_bytes == 1111


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ('{"step": 1, "sft/loss": 2.5}\n{"step": 2, "sft/loss": 1.5, "sft/val_loss": 1.75}\n', (2, 1.5, 1.75)),
        ('{"step": 1, "critic/score/mean": 1.0}\n{"step": 2, "critic/sc', (1, 1.0, None)),  # being written
        (
            '{"step": 6, "critic/score/mean": 1.0, "val/score/mean": 0.25}\n'
            + "".join(f'{{"step": {step}, "critic/score/mean": 0.5}}\n' for step in range(7, 3000)),
            (2999, 0.5, 0.25),  # a validation many steps ago
        ),
        (
            '{"step": 5, "critic/score/mean": 1.0}\n'
            '{"step": 6, "critic/score/mean": null, "non_finite": {"critic/score/mean": "inf"}}\n',
            (6, float("inf"), None),  # not replaced by an older one
        ),
    ],
)
def test_the_last_values_of_a_run_are_found(run, rows, expected):
    (run / "metrics.jsonl").write_text(rows)
    row = run_row(run)
    assert (row.step, row.value, row.val_value, row.problem) == (*expected, "")


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("run.json", "{", "run.json' is damaged"),
        ("run.json", '{"starts": 5}', "starts is a int, not a list"),
        ("run.json", '{"starts": []}', "run.json' has no start of a run"),
        ("metrics.jsonl", '[1]\n{"step": 1}\n', "metrics.jsonl, line 2 from the end: '[1]' is not a JSON object"),
        ("metrics.jsonl", '{"x": 1}\n', "the last row has no integer step"),
        ("metrics.jsonl", None, "is a symbolic link"),
    ],
)
def test_an_unreadable_run_is_a_row_that_says_why(run, tmp_path, file, text, problem):
    if text is None:
        (run / file).rename(tmp_path / file)
        (run / file).symlink_to(tmp_path / file)
    else:
        (run / file).write_text(text)
    (row,) = list_runs(tmp_path)
    assert (row.state, problem in row.problem) == ("unreadable", True)


def test_a_directory_that_cannot_be_listed_is_a_row(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    (tmp_path / "private").mkdir()
    scandir = os.scandir

    def refused(path):
        if os.path.basename(path) == "private":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    private, run = list_runs(tmp_path)
    assert (private.path.name, private.state) == ("private", "unreadable")
    assert (private.problem, run.problem) == ("cannot be listed: Permission denied", "")


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    for name in ("run.json", "metrics.jsonl", ".lock"):
        run = write_run(tmp_path / name.strip("."))
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert [row.state for row in list_runs(tmp_path)] == ["finished", "unreadable", "unreadable"]


def test_runs_are_found_below_the_directory_but_not_inside_runs_or_links(tmp_path):
    outside = write_run(tmp_path / "outside")
    top = tmp_path / "runs"
    write_run(top / "b" / "c")
    write_run(top / "a")
    write_run(top / "a" / "inside")
    write_run(top / "1" / "2" / "3" / "4")
    write_run(top / "1" / "2" / "3" / "deep" / "deeper")
    (top / "link").symlink_to(outside)
    assert [str(row.path.relative_to(top)) for row in list_runs(top)] == ["1/2/3/4", "a", "b/c"]


def test_last_rows_are_read_from_the_end(tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text("".join(f'{{"step": {step}, "text": "{"x" * 100}"}}\n' for step in range(3000)) + '{"step": 3000')
    assert [row["step"] for row in read_last_rows(file, 3)] == [2997, 2998, 2999]
    assert len(read_last_rows(file, 2500)) == 2500
    assert len(read_last_rows(file, 9999)) == 3000
    assert read_last_rows(file, 2, '"step": 17,') == [{"step": 17, "text": "x" * 100}]
    file.write_text("")
    assert read_last_rows(file, 3) == []


def test_at_most_the_end_of_a_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "LAST_BYTES", 1 << 17)
    file = tmp_path / "long.jsonl"
    file.write_text('{"step": 1, "a": 1}\n' + "".join(f'{{"step": {step}}}\n' for step in range(2, 50_000)))
    assert read_last_rows(file, 1) == [{"step": 49_999}]
    assert read_last_rows(file, 1, '"a"') == []
    os.truncate(file, 1 << 40)
    with pytest.raises(DataError, match="have no line end; it is not a file of rows"):
        read_last_rows(file, 1)


@pytest.mark.runs
def test_trained_runs_have_all_of_a_row(grpo_run, sft_run, dpo_run):
    rows = {row.path.name: row for row in list_runs(grpo_run.parent)}
    of_runs = (("grpo", "train", grpo_run, 6), ("sft", "sft", sft_run, 12), ("dpo", "dpo", dpo_run, 12))
    for name, kind, run, steps in of_runs:
        row = rows[name]
        assert (row.kind, row.state, row.step, row.total_steps) == (kind, "finished", steps, steps)
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        assert row.value == last[row.figure]
        assert row.checkpoint_step == row.step
        assert row.checkpoint_bytes > 100_000
        assert 0 < row.started <= row.written + 1


def test_an_age_has_one_unit():
    assert [age(1000, 1000 + seconds) for seconds in (5, 65, 7300, 200_000)] == ["5 s", "1 min", "2 h", "2 d"]
    assert (age(0), age(1000, 900)) == ("-", "0 s")
