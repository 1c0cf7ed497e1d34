import io
import logging

import pytest
from rich.console import Console

from hybridflow.runtime.observe import ConsoleTracker, get_logger
from hybridflow.runtime.observe.console import one_line


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def printed():
    """Return `printed(steps, total, **options)`, the lines after logging metrics: (seconds, step, metrics)."""

    def log(steps, total, **options):
        file, clock = io.StringIO(), Clock()
        tracker = ConsoleTracker(total, console=Console(file=file), clock=clock, **options)
        for seconds, step, metrics in steps:
            clock.now = seconds
            tracker.log(step, {"note": "text", "nothing": None, **metrics})
            assert f"step {step}" in file.getvalue().splitlines()[-1]
        tracker.log_samples([{"prompt": "a", "response": "b", "score": 1.0}])  # not in a file
        return file.getvalue().splitlines()

    return log


def test_a_step_is_a_line_with_figures_in_one_order_and_the_time_left(printed):
    steps = [
        (10.0, 1, {"timing_s/step": 10.0, "critic/score/mean": 0.5, "response_length/mean": 31.25, "actor/lr": 1e-5}),
        (30.0, 2, {"val/accuracy": 0.25, "val/score/mean": 0.75, "critic/score/mean": 0.625}),
        (50.0, 3, {"critic/score/mean": 0.75}),
        (60.0, 4, {}),
    ]
    assert printed(steps, 4) == [
        "step 1/4  reward 0.5  response length 31.2  s/step 10",  # says nothing about the others
        "step 2/4  reward 0.625  val accuracy 0.25  val score 0.75  left 0:00:40",
        "step 3/4  reward 0.75  left 0:00:20",
        "step 4/4",
    ]
    assert printed([(0.0, 0, {"val/accuracy": 0.25}), (9.0, 1, {})], 0) == ["step 0  val accuracy 0.25", "step 1"]


def test_time_left_is_that_of_recent_steps_of_this_start(printed):
    resumed = [(100.0, 5, {"val/score/mean": 0.5}), (109.0, 6, {}), (111.0, 7, {})]
    lines = printed(resumed, 10, start_step=5)
    assert [line.partition("left ")[2] for line in lines] == ["", "", "0:00:06"]
    slower = [(float(step if step <= 30 else 30 + 5 * (step - 30)), step, {}) for step in range(1, 51)]
    assert printed(slower, 100)[-1] == "step 50/100  left 0:04:10"


def test_other_figures_and_a_title_can_be_chosen(printed):
    metrics = {"sft/loss": float("nan"), "critic/score/mean": 1.0}
    lines = printed([(1.0, 1, metrics)], 1, figures={"loss": "sft/loss"}, title="warm start")
    assert lines == ["warm start  step 1/1  loss nan"]


def test_a_terminal_shows_a_bar_samples_log_lines_and_the_last_validation(capsys):
    file = io.StringIO()
    tracker = ConsoleTracker(3, console=Console(file=file, force_terminal=True, width=100, color_system=None))
    tracker.log(1, {"critic/score/mean": 0.5, "val/accuracy": 0.25})
    assert "val accuracy 0.25" in file.getvalue()
    assert "(step" not in file.getvalue()
    tracker.log_samples([{"prompt": "use [1, 2]\nmake 3", "response": "1 + 2", "score": 1.0}, {"prompt": "[bold]"}])
    handler = next(h for h in get_logger("hybridflow").handlers if type(h).__name__ == "_StderrHandler")
    warning = logging.makeLogRecord({"msg": "a warning", "name": "x", "levelname": "WARNING"})
    logging.StreamHandler.emit(handler, warning)
    tracker.log(2, {"critic/score/mean": 0.75})
    tracker.close()
    tracker.close()
    shown = file.getvalue()
    for text in ("step 2/3", "use [1, 2] make 3", "1 + 2", "[bold]", "━", "a warning"):
        assert text in shown
    assert "reward 0.75  val accuracy 0.25 (step 1)" in shown
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "width", "line"),
    [("a\n b\tc ", 10, "a b c"), ("01234567", 8, "01234567"), ("01234567", 5, "01…67"), ("01234567", 4, "0…67")],
)
def test_one_line_removes_the_middle_of_a_long_text(text, width, line):
    assert one_line(text, width) == line


def test_a_step_whose_line_cannot_be_written_goes_on(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        tracker = ConsoleTracker(2)
        for step in (1, 2):
            tracker.log(step, {"critic/score/mean": 0.5})
        tracker.close()
        tracker.console.file.discard()
