"""The contract of every tracker, tested on each, and features of single trackers."""

import math
import sys

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridflow.errors import ConfigError
from hybridflow.runtime.observe import (
    GuardedTracker,
    JsonlWriter,
    MLflowTracker,
    MultiTracker,
    TensorBoardTracker,
    guarded_tracker,
    read_jsonl,
)
from hybridflow.runtime.observe.mlflow import metric_name
from hybridflow.runtime.observe.tracker import CleanNumbers, sample_table

METRIC = "critic/score/mean"


def steps_of_rows(path):
    return [(row["step"], row[METRIC]) for row in read_jsonl(path) if METRIC in row]


def steps_of_events(directory):
    events = EventAccumulator(str(directory))
    events.Reload()
    known = METRIC in events.Tags()["scalars"]
    return [(event.step, event.value) for event in events.Scalars(METRIC)] if known else []


TRACKERS = {"rows": (JsonlWriter, steps_of_rows), "tensorboard": (TensorBoardTracker, steps_of_events)}
"""Each tracker with the function that reads what it stored at a path."""


def test_metrics_are_stored_when_log_returns(tmp_path):
    tracker = MultiTracker([make(tmp_path / name) for name, (make, _) in TRACKERS.items()])

    def steps():
        first, *others = [read(tmp_path / name) for name, (_, read) in TRACKERS.items()]
        assert others == [first] * len(others)
        return first

    tracker.log(1, {})
    metrics = {"note": "text", "nothing": None, "bad": math.nan, METRIC: 0.25, "timing_s/step": 1.5}
    given = dict(metrics)
    tracker.log(2, given)
    assert repr(given) == repr(metrics)
    assert steps() == [(2, 0.25)]
    tracker.log(3, {METRIC: 0.5})
    tracker.close()
    tracker.close()
    assert steps() == [(2, 0.25), (3, 0.5)]


def test_tensorboard_drops_steps_that_a_resumed_run_repeats(tmp_path):
    for first, purge, values in ((1, None, (0.25, 0.5, 0.75)), (3, 3, (0.125,))):
        tracker = TensorBoardTracker(tmp_path, **({"purge_step": purge} if purge else {}))
        for step, value in enumerate(values, first):
            tracker.log(step, {METRIC: value})
        tracker.close()
    assert steps_of_events(tmp_path) == [(1, 0.25), (2, 0.5), (3, 0.125)]


def test_missing_tensorboard_package_is_an_error_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'hybridflow\[tensorboard\]'"):
        TensorBoardTracker(tmp_path)


class Failing:
    """A tracker that fails while `is_away`, and keeps the steps that it gets."""

    def __init__(self):
        self.is_away, self.got = True, []

    def log(self, step, metrics):
        if self.is_away:
            raise OSError("away")
        self.got.append(step)

    def close(self): ...


def test_a_guarded_tracker_keeps_what_it_can_and_tells_what_is_lost(monkeypatch, caplog):
    monkeypatch.setattr(guarded_tracker, "MAX_PENDING", 2)
    failing = Failing()
    guarded = GuardedTracker("mine", failing)
    for step in (1, 2, 3):
        guarded.log(step, {METRIC: 0.5})
    failing.is_away = False
    guarded.log(4, {METRIC: 0.5})
    guarded.close()
    assert failing.got == [3, 4]
    assert "tracker 'mine' lacks 2 steps, from step 1 on" in caplog.text


class FailsAsNumber(int):
    """A number of a user's library that cannot become a float."""

    def __float__(self):
        raise KeyError("x")


ODD = {
    f"{METRIC}\udcff": 1.0,
    "a b": 2.0,
    "a_b": np.float32(3.0),
    "_step": torch.tensor(4.0),
    "x" * 300: True,
    "//a/../b/": 5,
    "": 6.0,
    '\n"': 7.0,
    "inf": math.inf,
    "nan": math.nan,
    "step": 9,
    "huge": 10**400,
    "list": [math.nan],
    "fails": FailsAsNumber(2),
    "text": "\udcff",
    "set": {1},
    "array": np.arange(2),
    "none": None,
}
"""Metrics that one tracker or another refuses, by odd names, and values that none can hold."""
NUM_NUMBERS = 11


class Refusing(Failing):
    """A tracker that refuses odd steps and, while `is_away`, all."""

    def log(self, step, metrics):
        if step % 2:
            raise ValueError("odd")
        super().log(step, metrics)


def test_what_a_tracker_refuses_does_not_keep_the_rest_from_it(caplog):
    refusing = Refusing()
    guarded = GuardedTracker("mine", refusing)
    for step in range(1, 4):
        guarded.log(step, {})
    refusing.is_away = False
    for step in range(4, 9):
        guarded.log(step, {})
    guarded.close()
    assert refusing.got == [2, 4, 6, 8]
    assert "tracker 'mine' lacks 4 steps, from step 1 on" in caplog.text
    assert caplog.text.count("failed at step") == 2  # one for each kind of error


def test_a_value_or_name_that_a_tracker_refuses_leaves_the_others(tmp_path):
    rows, events = JsonlWriter(tmp_path / "rows"), TensorBoardTracker(tmp_path / "events")
    for tracker in (rows, events):
        tracker.log(3, ODD)
    (row,) = read_jsonl(tmp_path / "rows")
    assert row.keys() == ODD.keys() - {f"{METRIC}\udcff"} | {f"{METRIC}?"}
    assert (row["step"], row["huge"], row["text"]) == (3, 10**400, "?")
    found = EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert len(found.Tags()["scalars"]) == NUM_NUMBERS
    assert len(CleanNumbers(metric_name)(ODD)) == NUM_NUMBERS


def test_a_table_of_samples_has_values_that_every_library_holds():
    table = sample_table([{"prompt": "a\udcff", "ground_truth": 10**30, "score": {1}}, {"ground_truth": 4}])
    assert (table["prompt"], table["ground_truth"]) == (["a?", None], [str(10**30), 4])
    assert table["score"] == ['"{1}"', None]


NAMES = {
    "val/pass@4": "val/pass_4",
    "val/my source (é)/maj@2": "val/my source ___/maj_2",
    "//a/../b/": "a/b",
    "..": "_",
    ".../..a": "a",
}


def test_names_of_metrics_have_only_signs_that_mlflow_takes():
    assert {name: metric_name(name) for name in NAMES} == NAMES


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: MLflow looks up the commit of the program")
@pytest.mark.filterwarnings("ignore")  # of MLflow
def test_mlflow_takes_every_name_of_a_metric(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    tracker = MLflowTracker(tmp_path, "id", "run", {})
    tracker.log(1, {**dict.fromkeys(NAMES, 0.5), **ODD})
    run = tracker._client.get_run(tracker._id)
    tracker.close()
    assert len(run.data.metrics) == len(NAMES.keys() | ODD.keys()) - (len(ODD) - NUM_NUMBERS)
    assert run.data.metrics.keys() >= {*NAMES.values()}
