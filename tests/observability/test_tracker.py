"""The contract of every tracker, tested on each, and features of single trackers."""

import io
import json
import math
import re
import sys

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridflow.errors import ConfigError
from hybridflow.observability import (
    ConsoleTracker,
    GuardedTracker,
    JsonlWriter,
    MLflowTracker,
    MultiTracker,
    TensorBoardTracker,
    guarded_tracker,
)

METRIC = "critic/score/mean"


class JsonlCase:
    def __init__(self, directory):
        self.path = directory / "metrics.jsonl"
        self.tracker = JsonlWriter(self.path)

    def steps(self):
        return [
            (row["step"], row[METRIC]) for row in map(json.loads, self.path.read_text().splitlines()) if METRIC in row
        ]


class TensorBoardCase:
    def __init__(self, directory):
        self.directory = directory
        self.tracker = TensorBoardTracker(directory)

    def steps(self):
        events = EventAccumulator(str(self.directory))
        events.Reload()
        return (
            [(event.step, event.value) for event in events.Scalars(METRIC)]
            if METRIC in events.Tags()["scalars"]
            else []
        )


class PlainConsoleCase:
    def __init__(self, directory):
        self.file = io.StringIO()
        self.tracker = ConsoleTracker(10, console=Console(file=self.file), figures={"reward": METRIC})

    def steps(self):
        lines = [line.split() for line in self.file.getvalue().splitlines() if "reward" in line]
        return [(int(words[1].split("/")[0]), float(words[3])) for words in lines]


class LiveConsoleCase(PlainConsoleCase):
    def __init__(self, directory):
        self.file = io.StringIO()
        console = Console(file=self.file, force_terminal=True, width=120, color_system=None)
        self.tracker = ConsoleTracker(10, console=console, figures={"reward": METRIC})

    def steps(self):
        frames = re.findall(r"step (\d+)/10(?:(?!step).)*?reward (\S+)", self.file.getvalue(), re.DOTALL)
        return list(dict.fromkeys((int(step), float(reward)) for step, reward in frames))


class MultiCase(JsonlCase):
    def __init__(self, directory):
        self.path = directory / "metrics.jsonl"
        self.tracker = MultiTracker([JsonlWriter(self.path), TensorBoardTracker(directory / "tensorboard")])


@pytest.fixture(params=[JsonlCase, TensorBoardCase, PlainConsoleCase, LiveConsoleCase, MultiCase])
def case(request, tmp_path):
    made = request.param(tmp_path)
    yield made
    made.tracker.close()


def test_metrics_are_stored_when_log_returns(case):
    case.tracker.log(1, {METRIC: 0.25})
    assert case.steps() == [(1, 0.25)]
    case.tracker.log(2, {METRIC: 0.5})
    assert case.steps() == [(1, 0.25), (2, 0.5)]


def test_step_without_metrics_is_accepted(case):
    case.tracker.log(1, {})
    case.tracker.log(2, {METRIC: 0.5})
    assert (2, 0.5) in case.steps()


def test_log_does_not_change_the_metrics(case):
    metrics = {METRIC: 0.25, "timing_s/step": 1.5}
    case.tracker.log(1, metrics)
    assert metrics == {METRIC: 0.25, "timing_s/step": 1.5}


def test_text_none_and_non_finite_values_are_accepted(case):
    case.tracker.log(1, {"note": "text", "nothing": None, "bad": math.nan, METRIC: 0.25})
    assert case.steps() == [(1, 0.25)]


def test_tracker_can_be_closed_twice(case):
    case.tracker.log(1, {METRIC: 0.25})
    case.tracker.close()
    case.tracker.close()
    assert case.steps() == [(1, 0.25)]


def test_tensorboard_drops_steps_that_a_resumed_run_repeats(tmp_path):
    first = TensorBoardCase(tmp_path)
    for step in (1, 2, 3):
        first.tracker.log(step, {METRIC: 0.25 * step})
    first.tracker.close()
    second = TensorBoardTracker(tmp_path, purge_step=3)
    second.log(3, {METRIC: 0.125})
    second.close()
    assert first.steps() == [(1, 0.25), (2, 0.5), (3, 0.125)]


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


@pytest.mark.filterwarnings("ignore")  # of MLflow
def test_mlflow_takes_every_name_of_a_metric(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    tracker = MLflowTracker(tmp_path, "id", "run", {})
    tracker.log(1, {"val/pass@4": 0.5, "val/my source (é)/maj@2": 0.25})
    run = tracker._client.get_run(tracker._id)
    tracker.close()
    assert run.data.metrics == {"val/pass_4": 0.5, "val/my source ___/maj_2": 0.25}
