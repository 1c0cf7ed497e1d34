"""Comparison of runs: hand-written ones, and the canonical ones."""

import json
import math

import pytest

from fixtures.report_runs import write_run
from hybridflow.cli.inspect.run_comparison import compare_runs
from hybridflow.runtime.observe.run_files import RunFiles


@pytest.fixture
def pair(tmp_path):
    return [write_run(tmp_path / name) for name in "ab"]


def compared(a, b):
    return compare_runs(RunFiles(a), RunFiles(b))


def write_metrics(run, *rows):
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_equal_runs_do_not_differ(pair):
    a, b = pair
    found = compared(a, b)
    assert (found.config, found.environment, found.curves, found.times, found.only) == ({}, {}, [], [], ([], []))
    assert (found.num_equal, found.has_prompts, found.first_other_prompts) == (1, True, None)
    assert found.steps == list(range(1, 13))


def test_configuration_and_environment_are_compared_by_key(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)
    document = json.loads((b / "run.json").read_text())
    document["starts"][0] |= {"versions": {"torch": "2.14.0", "ray": "2.60.0"}}
    document["starts"][0]["config"]["new.key"] = 3
    (b / "run.json").write_text(json.dumps(document))
    found = compared(a, b)
    assert found.config == {"new.key": (None, 3), "trainer.seed": (0, 1)}
    assert found.environment == {"versions.ray": (None, "2.60.0"), "versions.torch": ("2.13.0", "2.14.0")}


def test_a_curve_says_where_it_first_differs_and_by_how_much(pair):
    a, b = pair
    write_metrics(a, *({"step": step, "actor/loss": 1.0, "timing_s/step": 1.0} for step in range(1, 31)))
    write_metrics(b, *({"step": s, "actor/loss": 1.0 + (s > 4) * s, "timing_s/step": s} for s in range(1, 26)))
    found = compared(a, b)
    (curve,) = found.curves
    assert (curve.name, curve.first_step, curve.largest) == ("actor/loss", 5, 25.0)
    assert (curve.last_a, curve.last_b) == (1.0, 26.0)
    assert (curve.mean_a, curve.mean_b) == (1.0, 1.0 + sum(range(16, 26)) / 10)
    assert [each.name for each in found.times] == ["timing_s/step"]
    assert (found.steps, found.last_steps) == (list(range(1, 26)), (30, 25))


def test_a_value_that_is_not_finite_differs_by_infinity(pair):
    a, b = pair
    write_metrics(a, {"step": 1, "x": None, "y": None, "non_finite": {"x": "nan", "y": "nan"}})
    write_metrics(b, {"step": 1, "x": 1.0, "y": None, "non_finite": {"y": "nan"}})
    (curve,) = compared(a, b).curves
    assert (curve.name, curve.largest) == ("x", math.inf)


def test_other_prompts_and_metrics_of_one_run_are_named(pair):
    a, b = pair
    rows = [json.loads(line) for line in (b / "rollouts.jsonl").read_text().splitlines()]
    rows[6]["prompt_id"][0] = "other"
    (b / "rollouts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_metrics(b, {"step": 1, "critic/kl": 1.0})
    found = compared(a, b)
    assert (found.first_other_prompts, found.curves, found.num_equal) == (7, [], 0)
    assert found.only == (["critic/score/mean", "timing_s/generate_sequences", "timing_s/step"], ["critic/kl"])


def test_a_metric_is_compared_at_the_steps_at_which_both_rows_have_it(pair):
    a, b = pair
    write_metrics(a, {"step": 1, "x": 1, "y": 1}, {"step": 2, "x": 2, "z": 1}, {"step": 3, "x": 3})
    write_metrics(b, {"step": 1, "y": 1.0, "z": 1}, {"step": 2, "x": 4}, {"step": 3})
    found = compared(a, b)
    (curve,) = found.curves
    assert (curve.name, curve.first_step, curve.largest, curve.mean_a, curve.mean_b) == ("x", 2, 2.0, 2.0, 4.0)
    assert (found.num_equal, found.only) == (1, ([], []))  # y; z is never in both


@pytest.mark.runs
def test_trained_runs_differ_where_their_settings_do(grpo_run, lora_run):
    found = compared(grpo_run, lora_run)
    assert {name for name in found.config if not name.startswith("lora.")} == {"trainer.run_dir"}
    assert found.config["lora.rank"] == (0, 4)
    commits = tuple(RunFiles(run).starts[-1]["git"]["commit"] for run in (grpo_run, lora_run))
    expected = {"git.commit": commits} if len(set(commits)) == 2 else {}  # a commit may come between the runs
    assert (found.environment, found.data, found.first_other_prompts) == (expected, {}, None)
    assert (found.steps, found.has_data) == (list(range(7)), True)
    curves = {curve.name: curve for curve in found.curves}
    assert curves["actor/entropy"].first_step == 2  # the weights of the first step are the same
    assert "training/epoch" not in curves
    assert "timing_s/step" in {each.name for each in found.times}
    start = RunFiles(grpo_run).starts[-1]
    assert (start["data"]["train_rows"], start["data"]["val_rows"]) == (24, 10)
    assert start["data"]["train_fingerprint"] != start["data"]["val_fingerprint"]
    assert set(start["models"]) == {"model.path", "reference.model_path"}
