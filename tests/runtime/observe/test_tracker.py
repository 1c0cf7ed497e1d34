"""The contract of every tracker, tested on each, and features of single trackers."""

import math
import sys

import pytest
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


NAMES = {"val/pass@4": "val/pass_4", "val/my source (é)/maj@2": "val/my source ___/maj_2"}


def test_names_of_metrics_have_only_signs_that_mlflow_takes():
    assert {name: metric_name(name) for name in NAMES} == NAMES


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: MLflow looks up the commit of the program")
@pytest.mark.filterwarnings("ignore")  # of MLflow
def test_mlflow_takes_every_name_of_a_metric(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    tracker = MLflowTracker(tmp_path, "id", "run", {})
    tracker.log(1, dict.fromkeys(NAMES, 0.5))
    run = tracker._client.get_run(tracker._id)
    tracker.close()
    assert run.data.metrics == dict.fromkeys(NAMES.values(), 0.5)
