import json

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
    head, *lines = output_of(capsys, "runs", runs).splitlines()
    assert head.split()[:5] == ["run", "kind", "recipe", "step", "figure"]
    assert [line.split()[:4] for line in lines] == [
        ["long", "-", "recipe.toml", "8/?"],
        ["short", "-", "recipe.toml", "3/?"],
    ]
    rows = json.loads(output_of(capsys, "runs", runs, "--json", "--sort", "value"))
    assert sorted(row["value"] for row in rows) == [row["value"] for row in rows][::-1]


def test_a_directory_without_runs_says_so(capsys, tmp_path):
    assert f"no run in '{tmp_path}'" in output_of(capsys, "runs", tmp_path)
    assert main(["runs", str(tmp_path / "missing")]) != 0
    assert "is not a directory; name one with runs" in capsys.readouterr().err


def test_two_runs_are_compared(capsys, runs):
    text = output_of(capsys, "compare", runs / "short", runs / "long")
    assert "configuration: 2 differ" in text
    assert "environment: the same" in text
    assert "prompts: the same in all common steps" in text
    assert "curves, steps 1 to 3 of both: 0 metrics are the same, 1 differ" in text
    assert "critic/score/mean" in text
    assert "critic/score/mean" not in output_of(capsys, "compare", runs / "short", runs / "long", "--metric", "kl")
    assert json.loads(output_of(capsys, "compare", runs / "short", runs / "long", "--json"))["steps"] == [1, 2, 3]


def test_a_run_equals_itself(capsys, runs):
    text = output_of(capsys, "compare", runs / "short", runs / "short", "--times")
    assert "configuration: the same" in text
    assert "1 metrics are the same, 0 differ" in text


def test_runs_without_a_common_step_are_compared(capsys, runs):
    (runs / "long" / "metrics.jsonl").write_text('{"step": 77, "critic/score/mean": 1.0}\n')
    assert "the runs have no common step" in output_of(capsys, "compare", runs / "short", runs / "long")


def test_what_is_not_a_run_is_an_error(capsys, runs):
    assert main(["compare", str(runs / "short"), str(runs)]) != 0
    assert "is not the directory of a run: it has no run.json" in capsys.readouterr().err
