"""`hybridflow runs`: the table, its order, and names and numbers that a terminal or JSON must not get as they are."""

import json
import os

import pytest

from fixtures.report_runs import write_run
from hybridflow.cli.main import main


@pytest.fixture
def runs(tmp_path):
    for name, steps, seed in (("short", 3, 0), ("long", 8, 1)):
        write_run(tmp_path / "runs" / name, steps=steps, seed=seed)
    return tmp_path / "runs"


def output_of(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_runs_are_a_table(capsys, runs):
    checkpoint = runs / "short" / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "actor.safetensors").write_bytes(bytes(2_500_000))
    head, *lines = output_of(capsys, "runs", runs).splitlines()
    assert head.split() == [
        *("run", "kind", "recipe", "step", "figure", "value", "validation", "state", "started", "written", "size")
    ]
    assert [line.split()[:5] for line in lines] == [
        ["long", "train", "recipe.toml", "8/8", "critic/score/mean"],
        ["short", "train", "recipe.toml", "3/3", "critic/score/mean"],
    ]
    assert [line.split("  ")[-1].strip() for line in lines] == ["-", "2.5 MB"]


def test_the_default_directory_is_runs(capsys, runs, monkeypatch):
    monkeypatch.chdir(runs.parent)
    assert output_of(capsys, "runs") == output_of(capsys, "runs", "runs")
    monkeypatch.chdir(runs)
    assert main(["runs"]) == 2
    assert "error: 'runs' is not a directory; name one that has runs: hybridflow runs DIR." in capsys.readouterr().err


def test_a_directory_that_is_a_run_is_its_only_row(capsys, runs):
    assert output_of(capsys, "runs", runs / "long").splitlines()[1].startswith(f"{runs / 'long'}  train")


def write_last_row(run, **values):
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **values}) + "\n")


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("name", ["a", "b", "c", "d"]),
        ("value", ["b", "a", "c", "d"]),
        ("validation", ["a", "b", "c", "d"]),
        ("written", ["d", "c", "b", "a"]),
    ],
)
def test_the_best_or_newest_run_is_first_and_nan_last(capsys, tmp_path, sort, names):
    rows = {
        "a": {"critic/score/mean": 0.25, "val/score/mean": 0.5},
        "b": {"critic/score/mean": 0.75, "val/score/mean": 0.25},
        "c": {"critic/score/mean": None, "non_finite": {"critic/score/mean": "nan"}},
        "d": {},
    }
    for i, (name, row) in enumerate(rows.items()):
        write_last_row(write_run(tmp_path / name), **row)
        os.utime(tmp_path / name / "metrics.jsonl", (i, i))
    found = json.loads(output_of(capsys, "runs", tmp_path, "--json", "--sort", sort))
    assert [row["path"] for row in found] == [str(tmp_path / name) for name in names]
    assert {row["path"][-1]: row["value"] for row in found} == {"a": 0.25, "b": 0.75, "c": "nan", "d": None}


def test_a_smaller_loss_is_better(capsys, tmp_path):
    for name, loss in (("a", 2.0), ("b", 1.0)):
        write_last_row(write_run(tmp_path / name), **{"sft/loss": loss})
    assert [line[0] for line in output_of(capsys, "runs", tmp_path, "--sort", "value").splitlines()[1:]] == ["b", "a"]


def test_a_directory_without_runs_says_so(capsys, tmp_path):
    assert output_of(capsys, "runs", tmp_path) == f"no run in '{tmp_path}': a run is a directory with run.json\n"
    assert output_of(capsys, "runs", tmp_path, "--json") == "[]\n"


def test_a_file_or_a_missing_directory_is_an_error(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "missing"):
        assert main(["runs", str(tmp_path / name)]) == 2
        assert f"'{tmp_path / name}' is not a directory" in capsys.readouterr().err


def test_an_unreadable_run_is_named_below_the_table(capsys, runs):
    (runs / "long" / "run.json").write_text("{")
    lines = output_of(capsys, "runs", runs).splitlines()[1:]
    assert [line.split()[0] for line in lines[:2]] == ["long", "short"]
    assert lines[0].split()[7] == "unreadable"
    assert lines[2:] == ["", lines[3]]
    assert lines[3].startswith(f"{runs / 'long'}: '{runs / 'long' / 'run.json'}' is damaged")


def test_names_cannot_control_the_terminal_or_break_the_table(capsys, tmp_path):
    directory = os.fsencode(tmp_path) + b"/escape\x1b[2J\nline\xff\xe2\x80\xae"
    os.rename(write_run(tmp_path / "run"), directory)
    assert output_of(capsys, "runs", tmp_path).splitlines()[1].startswith("escape\\x1b[2J\\nline\\udcff\\u202e  train")
    assert json.loads(output_of(capsys, "runs", tmp_path, "--json"))[0]["path"] == os.fsdecode(directory)
