import io
import logging

import pytest
from rich.console import Console

from hybridflow.observability import ConsoleTracker, get_logger
from hybridflow.observability.console import one_line


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def file():
    return io.StringIO()


def live(file):
    return Console(file=file, force_terminal=True, width=100, color_system=None)


def test_file_output_is_one_line_per_step_with_its_metrics(file, clock):
    tracker = ConsoleTracker(4, console=Console(file=file), clock=clock)
    clock.now = 10.0
    tracker.log(1, {"critic/score/mean": 0.5, "response_length/mean": 31.25, "timing_s/step": 10.0, "actor/lr": 1e-5})
    clock.now = 30.0
    tracker.log(2, {"critic/score/mean": 0.625, "val/accuracy": 0.25, "val/score/mean": 0.75})
    clock.now = 50.0
    tracker.log(3, {"critic/score/mean": 0.75})
    assert file.getvalue() == (
        "step 1/4  reward 0.5  response length 31.2  s/step 10  left 0:00:30\n"
        "step 2/4  reward 0.625  val accuracy 0.25  val score 0.75  left 0:00:30\n"
        "step 3/4  reward 0.75  left 0:00:17\n"
    )


def test_figures_of_a_line_have_the_same_order_at_every_step(file):
    tracker = ConsoleTracker(0, console=Console(file=file))
    tracker.log(0, {"val/accuracy": 0.25})
    tracker.log(1, {"timing_s/step": 2.0, "val/accuracy": 0.5, "critic/score/mean": 0.75})
    assert file.getvalue() == "step 0  val accuracy 0.25\nstep 1  reward 0.75  val accuracy 0.5  s/step 2\n"


def test_time_left_excludes_earlier_steps_and_the_first_validation(file, clock):
    tracker = ConsoleTracker(10, start_step=5, console=Console(file=file), clock=clock)
    clock.now = 100.0
    tracker.log(5, {"val/score/mean": 0.5})
    clock.now = 102.0
    tracker.log(6, {})
    assert [line.partition("left ")[2] for line in file.getvalue().splitlines()] == ["", "0:00:08"]


def test_time_left_is_estimated_from_recent_steps(file, clock):
    tracker = ConsoleTracker(100, console=Console(file=file), clock=clock)
    for step in range(1, 51):
        clock.now += 1.0 if step <= 30 else 5.0
        tracker.log(step, {})
    assert file.getvalue().splitlines()[-1] == "step 50/100  left 0:04:10"


def test_no_time_left_on_the_last_step_or_without_a_total(file, clock):
    ConsoleTracker(1, console=Console(file=file), clock=clock).log(1, {})
    ConsoleTracker(0, console=Console(file=file), clock=clock).log(3, {})
    assert file.getvalue() == "step 1/1\nstep 3\n"


def test_other_figures_and_a_title_can_be_chosen(file):
    tracker = ConsoleTracker(1, console=Console(file=file), figures={"loss": "sft/loss"}, title="warm start")
    tracker.log(1, {"sft/loss": 2.0, "critic/score/mean": 1.0})
    assert file.getvalue() == "warm start  step 1/1  loss 2\n"


def test_terminal_shows_a_bar_and_samples(file):
    tracker = ConsoleTracker(2, console=live(file))
    tracker.log(1, {"critic/score/mean": 0.5})
    tracker.log_samples([{"prompt": "use [1, 2]\nmake 3", "response": "1 + 2", "score": 1.0}, {"prompt": "[bold]"}])
    tracker.close()
    last = file.getvalue()
    assert "step 1/2" in last
    assert "reward 0.5" in last
    assert "use [1, 2] make 3" in last
    assert "1 + 2" in last
    assert "[bold]" in last
    assert "━" in last


def test_live_display_keeps_the_last_validation_and_its_step(file):
    tracker = ConsoleTracker(3, console=live(file))
    tracker.log(1, {"critic/score/mean": 0.5, "val/accuracy": 0.25})
    assert "val accuracy 0.25" in file.getvalue()
    assert "(step" not in file.getvalue()
    tracker.log(2, {"critic/score/mean": 0.75})
    tracker.close()
    assert "reward 0.75  val accuracy 0.25 (step 1)" in file.getvalue()


def test_file_output_has_no_samples(file):
    ConsoleTracker(2, console=Console(file=file)).log_samples([{"prompt": "a", "response": "b", "score": 1.0}])
    assert file.getvalue() == ""


def test_log_lines_appear_above_the_live_display(file, capsys):
    tracker = ConsoleTracker(2, console=live(file))
    tracker.log(1, {"critic/score/mean": 0.5})
    handler = next(h for h in get_logger("hybridflow").handlers if type(h).__name__ == "_StderrHandler")
    logging.StreamHandler.emit(
        handler, logging.makeLogRecord({"msg": "a warning", "name": "x", "levelname": "WARNING"})
    )
    tracker.close()
    assert "a warning" in file.getvalue()
    assert capsys.readouterr().err == ""


def test_non_finite_metric_is_shown(file):
    ConsoleTracker(1, console=Console(file=file), figures={"loss": "sft/loss"}).log(1, {"sft/loss": float("nan")})
    assert file.getvalue() == "step 1/1  loss nan\n"


@pytest.mark.parametrize(
    ("text", "width", "line"),
    [
        ("a\n b\tc ", 10, "a b c"),
        ("0123456789", 10, "0123456789"),
        ("0123456789", 5, "01…89"),
        ("0123456789", 4, "0…89"),
    ],
)
def test_one_line_removes_the_middle_of_a_long_text(text, width, line):
    assert one_line(text, width) == line
