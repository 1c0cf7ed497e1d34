"""Logs of a run: metrics, samples and trace of each step to files, console and trackers."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from hybridflow.errors import DataError
from hybridflow.observability import (
    ConsoleTracker,
    MultiTracker,
    TraceEvent,
    read_jsonl,
    trace_row,
)
from hybridflow.observability.trace import CONTROLLER
from hybridflow.trainers.advice_monitor import AdviceMonitor
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.run_trackers import run_trackers
from hybridflow.trainers.samples import NO_SAMPLES, Samples


class RunLog:
    """The logs of a run; constructing one begins the run directory. `figures`: console label -> metric."""

    def __init__(self, run: RunDirectory, *, total_steps: int, figures: Mapping[str, str]) -> None:
        self._run = run
        run.start_facts["total_steps"] = total_steps
        self._metrics, self._samples, self._rollouts, self._trace = run.begin()
        self._console = ConsoleTracker(total_steps, start_step=run.step, figures=figures, title=run.path.name)
        self._further = run_trackers(run)
        self._trackers = MultiTracker([self._metrics, self._console, *self._further])
        self._written_at = time.time()
        self._advice = AdviceMonitor(run.config, total_steps, read_jsonl(self._metrics.path) if run.step else ())

    def write(
        self,
        step: int,
        metrics: Mapping[str, Any],
        samples: Samples = NO_SAMPLES,
        events: Sequence[TraceEvent] = (),
    ) -> None:
        """Write metrics (unless empty), samples and trace events of a step."""
        before, self._written_at = self._written_at, time.time()
        of_step = TraceEvent("step", "", CONTROLLER, "", before, self._written_at)
        self._trace.write_all({"step": step, **trace_row(event)} for event in (*events, of_step))
        self._samples.write_all(samples.kept)
        self._rollouts.write_all([samples.numbers] if samples.numbers else ())
        if metrics:
            self._trackers.log(step, dict(sorted(metrics.items())))
        if samples.kept:
            self._console.log_samples(samples.kept)
            for tracker in self._further:
                tracker.log_samples(step, samples.kept)
        self._advice.note(step, metrics, samples)

    def rewind(self, step: int) -> None:
        """Remove the rows of later steps, which the run writes again."""
        self._advice.rewind(step)
        for writer in (self._metrics, self._samples, self._rollouts, self._trace):
            try:
                writer.truncate_after(step)
            except OSError as error:
                raise DataError(f"'{writer.path}' could not be cut to step {step}: {error}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._trackers.close()
        self._run.end()
