import json
import math

import pytest

from fixtures.report_runs import write_run
from hybridflow.cli.inspect.report import page_data
from hybridflow.cli.inspect.report.page_data import MAX_CHARS, MAX_SAMPLES, run_data
from hybridflow.errors import DataError
from hybridflow.runtime.observe.metrics import METRICS
from hybridflow.runtime.observe.run_files import RunFiles


def data_of(directory):
    return run_data(RunFiles(directory))


def append(file, *rows):
    with open(file, "a") as opened:
        opened.writelines(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def test_numbers_of_all_responses_are_lists_and_texts_are_codes(tmp_path):
    rollouts = data_of(write_run(tmp_path / "run", steps=3, rows=4))["rollouts"]
    assert rollouts["step"] == [1] * 4 + [2] * 4 + [3] * 4
    assert rollouts["row"] == [0, 1, 2, 3] * 3
    assert rollouts["texts"]["data_source"] == ["math", "code"]
    assert rollouts["data_source"] == [0, 1] * 6
    assert rollouts["staleness"] == [None] * 12
    assert len(rollouts["texts"]["prompt_id"]) == 3


def test_curves_have_a_value_for_each_step_and_name_what_is_not_finite(tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    append(run / "metrics.jsonl", {"step": 3, "critic/score/mean": None, "non_finite": {"critic/score/mean": "nan"}})
    append(run / "metrics.jsonl", {"step": 2, "critic/score/mean": 7.0})
    curves = data_of(run)["curves"]
    assert curves["steps"] == [1, 2, 3]
    assert curves["values"]["critic/score/mean"][1:] == [7.0, None]
    assert curves["values"]["timing_s/step"] == [1.5, None, None]
    assert curves["not_finite"] == {"critic/score/mean": [3]}


def test_figures_have_the_labels_of_the_console_and_metrics_their_meaning(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    append(run / "metrics.jsonl", {"step": 2, "val/accuracy": 0.5, "response_length/clip_ratio": 0.9, "own": 1.0})
    data = page_data([RunFiles(run)])
    assert data["runs"][0]["figures"] == {
        "reward": "critic/score/mean",
        "val accuracy": "val/accuracy",
        "s/step": "timing_s/step",
    }
    (advice,) = (each for each in data["runs"][0]["advice"] if each["title"].startswith("truncation"))
    assert advice["metric"] == "response_length/clip_ratio"
    assert data["metrics"]["timing_s/step"][0].endswith(" Unit: s.")
    assert data["metrics"]["val/accuracy"] == [METRICS["val/accuracy"].description, METRICS["val/accuracy"].worry]
    assert "own" not in data["metrics"]


def test_failed_best_worst_and_latest_samples_are_kept(tmp_path):
    run = write_run(tmp_path / "run", steps=300, rows=8, kept=8)
    rows = RunFiles(run).samples
    kept = data_of(run)["samples"]
    assert len(rows) == 2400
    assert len(kept) == MAX_SAMPLES
    places = {(sample["step"], sample["row"]) for sample in kept}
    for sample in rows:
        is_end = sample["failed"] or sample["score"] in (0.0, 1.0) or sample["step"] > 290
        assert (sample["step"], sample["row"]) in places or not is_end
    assert [(sample["step"], sample["row"]) for sample in kept] == sorted(places)


def test_a_long_text_is_cut_and_says_so(tmp_path):
    run = write_run(tmp_path / "run", steps=1, kept=1, texts=["x" * (MAX_CHARS + 5)])
    (sample,) = data_of(run)["samples"]
    assert sample["response"].endswith(f" ... cut: {MAX_CHARS + 5} characters in samples.jsonl")


@pytest.mark.parametrize(
    ("file", "row", "problem"),
    [
        ("rollouts.jsonl", {"step": 9, "score": [1.0], "length": [1, 2]}, "expected lists of equal length"),
        ("rollouts.jsonl", {"step": 9, "score": [1.0]}, "expected lists of equal length"),
        ("samples.jsonl", {"prompt": "p"}, "the row has no integer step"),
        ("samples.jsonl", {"step": 1, "prompt": 5}, "expected prompt and response as texts"),
        ("samples.jsonl", {"step": 1, "tokens": {"ids": [1], "texts": []}}, "tokens as lists of one length or 1"),
        ("rollouts.jsonl", {"step": 9, "score": ["1"], "length": [1]}, "expected lists of equal length"),
        ("samples.jsonl", {"step": 1, "score": "high"}, "expected prompt and response as texts"),
        ("metrics.jsonl", {"step": 1, "actor/loss": [1]}, "expected numbers"),
        ("trace/calls.jsonl", {"step": 1, "kind": "call"}, "is not an event of a trace"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, file, row, problem):
    run = write_run(tmp_path / "run", steps=1)
    (run / "trace").mkdir()
    append(run / file, row)
    with pytest.raises(DataError, match=problem):
        data_of(run)


def test_all_data_are_json_without_nan(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    append(run / "recoveries.jsonl", {"after_s": None, "non_finite": {"after_s": "inf"}})
    data = page_data([RunFiles(run)])
    assert data["runs"][0]["recoveries"] == [{"after_s": "inf"}]
    json.dumps(data, allow_nan=False)
    assert not any(isinstance(value, float) and math.isnan(value) for value in data["runs"][0]["rollouts"]["score"])
