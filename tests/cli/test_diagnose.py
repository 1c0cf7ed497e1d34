"""`hybridflow diagnose`: the advice for a run, as text and as JSON."""

import json

import pytest

from hybridflow.cli.main import main
from hybridflow.observability.advice.find import FINDINGS

HEALTHY = {"actor/lr": 1e-6, "response_length/clip_ratio": 0.1}


@pytest.fixture
def write_run(tmp_path):
    def write(metrics, steps=30):
        config = {"data.max_response_length": 100, "advice.window": 10}  # a run of an older version lacks keys
        (tmp_path / "run.json").write_text(json.dumps({"starts": [{"config": config}]}))
        rows = [{"step": step, **metrics} for step in range(1, steps + 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(tmp_path)

    return write


def test_a_finding_is_printed_with_what_to_do(write_run, capsys):
    assert main(["diagnose", write_run(HEALTHY | {"response_length/clip_ratio": 0.75})]) == 0
    assert capsys.readouterr().out == (
        "truncation (steps 21 to 30)\n"
        "  seen  75% of the responses are cut at data.max_response_length\n"
        "  why   A response that is cut has no answer yet, so its reward is that of an unfinished response.\n"
        "  do    try data.max_response_length = 200 or 400 (now 100)\n"
        "        check rollout.stop_strings (now [])\n"
        "        check reward.overlong_buffer (now 0)\n"
        "\n"
        f"1 finding; looked for {len(FINDINGS)}, in the metrics of steps 21 to 30, 0 samples and 0 rows of rollouts\n"
    )


def test_a_healthy_run_has_no_finding(write_run, capsys):
    assert main(["diagnose", write_run(HEALTHY)]) == 0
    assert capsys.readouterr().out.startswith(f"no findings; looked for {len(FINDINGS)}, in the metrics of steps 21 to")


def test_a_run_without_a_step_is_looked_at(write_run, capsys):
    assert main(["diagnose", write_run({}, steps=0)]) == 0
    assert "in the metrics of no step yet" in capsys.readouterr().out


def test_json_has_the_values_to_try(write_run, capsys):
    assert main(["diagnose", "--json", write_run(HEALTHY | {"response_length/clip_ratio": 0.75})]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["looked_at"] | {"findings": []} == {
        "steps": [21, 30],
        "metrics": 10,
        "samples": 0,
        "rollouts": 0,
        "findings": [],
    }
    (found,) = report["found"]
    assert found["name"] == "truncation"
    assert found["keys"][0] == ["data.max_response_length", 100, [200, 400]]


@pytest.fixture
def run_with_a_bad_start(write_run):
    """Return a run of 35 steps whose responses were cut in steps 1 to 15 only."""
    run = write_run(HEALTHY, steps=35)
    rows = [
        {"step": step, **HEALTHY} | ({"response_length/clip_ratio": 0.75} if step <= 15 else {})
        for step in range(1, 36)
    ]
    with open(f"{run}/metrics.jsonl", "w") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    return run


def test_what_only_earlier_steps_show_is_named(run_with_a_bad_start, capsys):
    assert main(["diagnose", run_with_a_bad_start]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"no findings; looked for {len(FINDINGS)}, in the metrics of steps 26 to 35")
    assert out.endswith("only in earlier steps: truncation (1-5, 6-15); look at them with --steps FIRST-LAST\n")
    assert main(["diagnose", "--json", run_with_a_bad_start]) == 0
    assert json.loads(capsys.readouterr().out)["found_earlier"] == {"truncation": [[1, 5], [6, 15]]}


def test_chosen_steps_are_looked_at(run_with_a_bad_start, capsys):
    assert main(["diagnose", run_with_a_bad_start, "--steps", "3-6"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("truncation (steps 3 to 6)\n  seen  75% of the responses are cut")
    assert "earlier" not in out
    assert main(["diagnose", run_with_a_bad_start, "--steps", "20"]) == 0
    assert capsys.readouterr().out.startswith(
        f"no findings; looked for {len(FINDINGS)}, in the metrics of steps 20 to 20"
    )


@pytest.mark.parametrize("steps", ["36-50", "0"])
def test_steps_that_the_run_does_not_have_are_an_error(run_with_a_bad_start, capsys, steps):
    assert main(["diagnose", run_with_a_bad_start, "--steps", steps]) == 2
    assert "has no metrics of these steps; metrics.jsonl shows its steps" in capsys.readouterr().err


def test_a_directory_that_is_not_a_run_is_an_error(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "is not the directory of a run: it has no run.json" in capsys.readouterr().err
