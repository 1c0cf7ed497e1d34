"""What a run shows on a terminal: progress, a few figures, a few samples. Elsewhere one plain line for each step."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

RL_FIGURES = {
    "reward": "critic/score/mean",
    "response length": "response_length/mean",
    "validation": "val/score/mean",
    "s/step": "timing_s/step",
}
SFT_FIGURES = {"loss": "sft/loss", "validation loss": "sft/val_loss", "s/step": "timing_s/step"}
DPO_FIGURES = {
    "loss": "dpo/loss",
    "accuracy": "dpo/accuracy",
    "margin": "dpo/margin",
    "validation accuracy": "dpo/val_accuracy",
    "s/step": "timing_s/step",
}
REWARD_MODEL_FIGURES = {
    "loss": "reward_model/loss",
    "accuracy": "reward_model/accuracy",
    "validation accuracy": "reward_model/val_accuracy",
    "s/step": "timing_s/step",
}

RECENT_STEPS = 20
"""The time left is told from the mean of so many steps: enough for those that also validate or save."""


class ConsoleTracker:
    """Shows the metrics named by `figures` (label -> metric name); one that a step lacks keeps its last value.

    On a terminal this is a live display below the log lines, otherwise one line for each step. `start_step` is the
    last step that was done before, where a run resumes; `total_steps` 0 is a number not known.
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
        self.console = console or Console()
        self._clock = clock
        self._step = self._start_step = start_step
        self._times = deque([(start_step, clock())], maxlen=RECENT_STEPS + 1)  # (step, when it was done)
        self._values: dict[str, float] = {}
        self._samples: tuple[Mapping[str, Any], ...] = ()
        self._live: Live | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step <= self._start_step:
            self._times.clear()  # validation before the first step is no measure of a step
        self._times.append((step, self._clock()))
        self._step = step
        self._values.update({label: metrics[name] for label, name in self.figures.items() if name in metrics})
        if self.console.is_terminal:
            self._show()
        else:
            self.console.print(Text(self._progress() + self._figures() + self._remaining()), soft_wrap=True)

    def log_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Show samples, each with `prompt`, `response` and `score`. Only the live display has room for them."""
        self._samples = tuple(samples)
        if self.console.is_terminal:
            self._show()

    def close(self) -> None:
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
        lines = (bar, Text(self._figures().strip()))
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

    def _figures(self) -> str:
        return "".join(f"  {label} {_number(value)}" for label, value in self._values.items())

    def _remaining(self) -> str:
        """Time left, from the mean time of recent steps; empty where it is not known."""
        (first, begin), (last, end) = self._times[0], self._times[-1]
        left = self.total_steps - self._step
        if last <= first or left <= 0:
            return ""
        return f"  left {timedelta(seconds=round((end - begin) / (last - first) * left))}"


def one_line(text: str, width: int) -> str:
    """`text` without line ends, its middle left out where it is longer than `width`: an answer stands at the end."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    head = max(0, (width - 1) // 2)
    return f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"


def _number(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
