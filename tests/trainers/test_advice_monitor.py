import pytest

from hybridflow.config import load_config
from hybridflow.trainers.run.run_log import AdviceMonitor
from hybridflow.trainers.run.samples import Samples

GOOD = {"response_length/clip_ratio": 0.1, "actor/lr": 1e-6, "actor/entropy": 1.0}
CUT = GOOD | {"response_length/clip_ratio": 0.9}
ALL_CUT = GOOD | {"response_length/clip_ratio": 1.0}


def monitor_of(*changes, total_steps=100, rows=()):
    return AdviceMonitor(load_config(None, ["advice.window=4", *changes]), total_steps, rows)


@pytest.fixture
def warnings_of(caplog):
    def run(monitor, steps, first=1, samples=lambda step: Samples()):
        logged = {}
        for step, metrics in enumerate(steps, first):
            caplog.clear()
            monitor.note(step, metrics, samples(step))
            if caplog.messages:
                logged[step] = [": ".join(message.split(": ")[:2]) for message in caplog.messages]
        return logged

    return run


@pytest.mark.parametrize(
    ("monitor", "steps", "expected"),
    [
        ((), [CUT] * 10, {4: ["steps 1 to 4: truncation"], 8: ["steps 5 to 8: truncation"]}),  # once in each window
        ((), [ALL_CUT] * 8, {1: ["step 1: truncation"], 8: ["steps 5 to 8: truncation"]}),  # a total fault at once
        ((), [GOOD] * 8, {}),
        (("advice.enabled=false",), [ALL_CUT] * 8, {}),
    ],
)
def test_a_finding_is_logged_once_in_each_window(warnings_of, monitor, steps, expected):
    assert warnings_of(monitor_of(*monitor), steps) == expected


def test_a_run_shorter_than_a_window_is_looked_at_when_it_ends(warnings_of):
    assert warnings_of(monitor_of(total_steps=3), [CUT] * 3) == {3: ["steps 1 to 3: truncation"]}


def test_validation_before_the_first_step_is_not_a_step(warnings_of):
    assert warnings_of(monitor_of(), [{"val/accuracy": 0.0}, ALL_CUT], first=0) == {1: ["step 1: truncation"]}


def test_entropy_is_compared_with_the_first_step_of_a_long_or_resumed_run(warnings_of):
    steps = [GOOD | {"actor/entropy": 4.0 / step} for step in range(1, 49)]
    expected = {step: [f"steps {step - 3} to {step}: entropy collapse"] for step in range(12, 49, 4)}
    assert warnings_of(monitor_of(), steps) == expected
    rows = [{"step": step, **metrics} for step, metrics in enumerate(steps[:38], start=1)]
    resumed = warnings_of(monitor_of(rows=rows), steps[38:], first=39)
    assert resumed == {step: expected[step] for step in (40, 44, 48)}


def test_steps_that_are_made_again_count_once(warnings_of):
    monitor = monitor_of()
    assert warnings_of(monitor, [GOOD, CUT, CUT]) == {}
    monitor.rewind(1)
    assert warnings_of(monitor, [GOOD, GOOD, GOOD], first=2) == {}


def test_samples_of_the_window_are_looked_at(warnings_of):
    def samples(step):
        kept = [{"step": step, "prompt": "2 + 2", "ground_truth": step % 2, "tokens": {"ids": [1]}}]
        return Samples(kept)

    assert warnings_of(monitor_of(), [GOOD] * 4, samples=samples) == {4: ["steps 1 to 4: data contradictory"]}
