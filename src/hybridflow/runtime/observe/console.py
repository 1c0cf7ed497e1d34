"""The console output of a run: a live display on a terminal, otherwise one plain line per step."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import IO, Any, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybridflow.runtime.lenient_output import LenientOutput
from hybridflow.runtime.observe.tracker import number_of

RL_FIGURES = {
    "reward": "critic/score/mean",
    "response length": "response_length/mean",
    "val accuracy": "val/accuracy",
    "val score": "val/score/mean",
    "s/step": "timing_s/step",
}
"""Figures of RL on the console, label -> metric. Accuracy (share of scores of at least 1) and score may differ."""
SFT_FIGURES = {"loss": "sft/loss", "val loss": "sft/val_loss", "s/step": "timing_s/step"}
"""Figures of supervised training on the console, label -> metric."""
DPO_FIGURES = {
    "loss": "dpo/loss",
    "accuracy": "dpo/accuracy",
    "margin": "dpo/margin",
    "val accuracy": "dpo/val_accuracy",
    "s/step": "timing_s/step",
}
"""Figures of DPO on the console, label -> metric."""
REWARD_MODEL_FIGURES = {
    "loss": "reward_model/loss",
    "accuracy": "reward_model/accuracy",
    "val accuracy": "reward_model/val_accuracy",
    "s/step": "timing_s/step",
}
"""Figures of a reward model on the console, label -> metric."""

RECENT_STEPS = 20
"""Number of steps whose mean duration estimates the time left; it includes steps that also validate or save."""


class ConsoleTracker:
    """A tracker that shows the metrics named by `figures` (label -> metric name).

    On a terminal it is a live display below the log lines. It keeps the last value of a metric that the newest step
    lacks and shows which step the value is from. Elsewhere it prints one line per step with the metrics of that step.
    `start_step` is the last finished step of a resumed run; `total_steps=0` means unknown.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        figures: Mapping[str, str] = RL_FIGURES,
        title: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.figures = dict(figures)
        self.title = title
        self.console = console or Console(file=cast(IO[str], LenientOutput(sys.stdout)))
        self._clock = clock
        self._step = self._start_step = start_step
        self._times = deque([(start_step, clock())], maxlen=RECENT_STEPS + 1)  # (step, time when it finished)
        self._values: dict[str, tuple[int, float]] = {}  # label -> (step, value)
        self._samples: tuple[Mapping[str, Any], ...] = ()
        self._live: Live | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the step and its metrics: update the live display or print one line."""
        if step <= self._start_step + 1:
            self._times.clear()  # the first step compiles and allocates, and may follow a validation
        self._times.append((step, self._clock()))
        self._step = step
        for label, name in self.figures.items():
            if number_of(metrics.get(name)) is not None:
                self._values[label] = step, metrics[name]
        if self.console.is_terminal:
            self._show()
        else:
            self.console.print(Text(self._progress() + self._figures(self._step) + self._remaining()), soft_wrap=True)

    def log_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Show samples, each with `prompt`, `response` and `score`, in the live display; not printed elsewhere."""
        self._samples = tuple(samples)
        if self.console.is_terminal:
            self._show()

    def close(self) -> None:
        """Stop the live display; its last state stays on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self) -> None:
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        self._live.update(self._display(), refresh=True)

    def _progress(self) -> str:
        step = f"step {self._step}/{self.total_steps}" if self.total_steps else f"step {self._step}"
        return f"{self.title}  {step}" if self.title else step

    def _display(self) -> Group:
        bar = Table.grid(padding=(0, 1))
        total = max(self.total_steps, self._step, 1)
        bar.add_row(
            ProgressBar(total=total, completed=self._step, width=30), Text(self._progress() + self._remaining())
        )
        lines = (bar, Text(self._figures(since_step=0).strip()))
        if not self._samples:
            return Group(*lines)
        samples = Table(expand=True, show_edge=False, pad_edge=False)
        samples.add_column("prompt", ratio=2, no_wrap=True, overflow="ellipsis")
        samples.add_column("response", ratio=3, no_wrap=True, overflow="ellipsis")
        samples.add_column("score", justify="right", no_wrap=True)
        for sample in self._samples:
            score = sample.get("score")
            samples.add_row(
                Text(one_line(str(sample.get("prompt", "")), self.console.width // 3)),
                Text(one_line(str(sample.get("response", "")), self.console.width // 2)),
                Text("" if score is None else _number(score)),
            )
        return Group(*lines, samples)

    def _figures(self, since_step: int) -> str:
        """Return the values of `since_step` and later, with the step of each value that is older than the newest."""
        return "".join(
            f"  {label} {_number(value)}" + (f" (step {step})" if step < self._step else "")
            for label in self.figures
            if label in self._values
            for step, value in [self._values[label]]
            if step >= since_step
        )

    def _remaining(self) -> str:
        """Return the time left by the mean duration of recent steps, or "" if it is unknown."""
        (first, begin), (last, end) = self._times[0], self._times[-1]
        left = self.total_steps - self._step
        if last <= first or left <= 0:
            return ""
        return f"  left {timedelta(seconds=round((end - begin) / (last - first) * left))}"


def one_line(text: str, width: int) -> str:
    """Return `text` on one line of at most `width` characters.

    A longer text loses its middle, since an answer is usually at the end.
    """
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    head = max(0, (width - 1) // 2)
    return f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"


def _number(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
