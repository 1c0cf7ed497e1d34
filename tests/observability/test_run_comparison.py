import json
import math

from fixtures.report_runs import write_run
from hybridflow.observability.run_comparison import compare_runs
from hybridflow.observability.run_files import RunFiles


def compared(a, b):
    return compare_runs(RunFiles(a), RunFiles(b))


def write_metrics(run, *rows):
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_equal_runs_do_not_differ(tmp_path):
    a, b = (write_run(tmp_path / name) for name in "ab")
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


def test_a_curve_says_where_it_first_differs_and_by_how_much(tmp_path):
    a, b = (write_run(tmp_path / name) for name in "ab")
    write_metrics(a, *({"step": step, "actor/loss": 1.0, "timing_s/step": 1.0} for step in range(1, 31)))
    write_metrics(b, *({"step": s, "actor/loss": 1.0 + (s > 4) * s, "timing_s/step": s} for s in range(1, 26)))
    found = compared(a, b)
    (curve,) = found.curves
    assert (curve.name, curve.first_step, curve.largest) == ("actor/loss", 5, 25.0)
    assert (curve.mean_a, curve.mean_b) == (1.0, 1.0 + sum(range(16, 26)) / 10)
    assert [each.name for each in found.times] == ["timing_s/step"]
    assert found.steps == list(range(1, 26))


def test_a_value_that_is_not_finite_differs_by_infinity(tmp_path):
    a, b = (write_run(tmp_path / name) for name in "ab")
    write_metrics(a, {"step": 1, "x": None, "y": None, "non_finite": {"x": "nan", "y": "nan"}})
    write_metrics(b, {"step": 1, "x": 1.0, "y": None, "non_finite": {"y": "nan"}})
    (curve,) = compared(a, b).curves
    assert (curve.name, curve.largest) == ("x", math.inf)


def test_other_prompts_and_metrics_of_one_run_are_named(tmp_path):
    a, b = (write_run(tmp_path / name) for name in "ab")
    rows = [json.loads(line) for line in (b / "rollouts.jsonl").read_text().splitlines()]
    rows[6]["prompt_id"][0] = "other"
    (b / "rollouts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_metrics(b, {"step": 1, "critic/kl": 1.0})
    found = compared(a, b)
    assert found.first_other_prompts == 7
    assert found.only == (["critic/score/mean", "timing_s/generate_sequences", "timing_s/step"], ["critic/kl"])
