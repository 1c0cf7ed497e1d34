"""Logs of a run: metrics, samples and trace of each step to files, console and trackers."""

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from hybridflow.config import Config, leaf_keys
from hybridflow.errors import ConfigError, DataError
from hybridflow.runtime.observe import (
    ConsoleTracker,
    MultiTracker,
    TensorBoardTracker,
    TraceEvent,
    Tracker,
    get_logger,
    read_jsonl,
    trace_row,
)
from hybridflow.runtime.observe.advice import advice_from
from hybridflow.runtime.observe.evidence import Evidence
from hybridflow.runtime.observe.guarded_tracker import GuardedTracker
from hybridflow.runtime.observe.mlflow import MLflowTracker
from hybridflow.runtime.observe.run_files import printable
from hybridflow.runtime.observe.trace import CONTROLLER
from hybridflow.runtime.observe.weights_and_biases import WandbTracker
from hybridflow.runtime.user_import import load_user_function
from hybridflow.trainers.run.run_directory import RunDirectory
from hybridflow.trainers.run.samples import NO_SAMPLES, Samples

KEPT = ("step", "prompt", "rendered_prompt", "ground_truth")
"""Keys of samples that are kept; a sample may have thousands of tokens."""


class AdviceMonitor:
    """Looks for findings after step 1, after every `advice.window` steps, and at the end of a shorter run.

    A finding is logged at most once in each window. It looks at the first rows and at the newest ones, and at the
    newest samples; it keeps no others. `rows`: metrics of the steps before a resume. `total_steps`: 0 if unknown.
    """

    def __init__(self, config: Config, total_steps: int, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._config, self._total_steps = leaf_keys(config), total_steps
        self._is_enabled, self._window = config.advice.enabled, config.advice.window
        self._rows: list[Mapping[str, Any]] = []
        self._samples: list[Mapping[str, Any]] = []
        self._logged: dict[str, int] = {}  # finding -> number of the window in which it was logged
        for row in rows:
            self._add(row)

    def note(self, step: int, metrics: Mapping[str, Any], samples: Samples = NO_SAMPLES) -> None:
        """Take the metrics and the samples of a step, and log the findings that are due."""
        if not self._is_enabled or not metrics or not step:
            return
        self._add({"step": step, **metrics})
        self._samples = [row for row in self._samples if row["step"] > step - self._window]
        self._samples += [{key: row[key] for key in KEPT if key in row} for row in samples.kept]
        is_whole = step % self._window == 0 or step == self._total_steps < self._window
        if not is_whole and step > 1:
            return
        evidence = Evidence(self._config, self._rows, self._samples)
        number = (step - 1) // self._window
        for advice in advice_from(evidence, at_first_step=not is_whole):
            if self._logged.get(advice.name) != number:
                self._logged[advice.name] = number
                logger.log(logging.INFO if advice.is_note else logging.WARNING, "%s", printable(advice.line))

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, which the run makes again."""
        for rows in (self._rows, self._samples):
            rows[:] = [row for row in rows if row["step"] <= step]

    def _add(self, row: Mapping[str, Any]) -> None:
        """Add a row of a training step; only the first and the last `advice.window` rows are kept."""
        if row["step"] > 0:
            self._rows.append(row)
            if len(self._rows) > 2 * self._window:
                del self._rows[self._window]


logger = get_logger(__name__)


def run_trackers(run: RunDirectory) -> list[GuardedTracker]:
    """Return the trackers of a run that has begun. Raises ConfigError for one that cannot be made."""
    trackers: list[GuardedTracker] = []
    with ExitStack() as stack:
        for name in run.config.trainer.trackers:
            trackers.append(GuardedTracker(name, _tracker(name, run)))
            stack.callback(trackers[-1].close)
        stack.pop_all()
    return trackers


def _tracker(name: str, run: RunDirectory) -> Tracker:
    config = leaf_keys(run.config)
    match name:
        case "tensorboard":
            return TensorBoardTracker(run.path / "tensorboard", purge_step=run.step + bool(run.checkpoint))
        case "wandb":
            return WandbTracker(run.path, _run_id(run), run.path.name, config)
        case "mlflow":
            return MLflowTracker(run.path, _run_id(run), run.path.name, config)
    return _own_tracker(name, run, config)


def _own_tracker(name: str, run: RunDirectory, config: dict[str, Any]) -> Tracker:
    """Return a tracker of the user's class, which is called with `run_dir` and `config`."""
    build = load_user_function(name, "tracker", ConfigError)
    try:
        tracker = build(run_dir=run.path, config=config)
    except Exception as error:  # of the user's class
        raise ConfigError(
            f"trainer.trackers: {name}(run_dir=..., config=...) failed: {type(error).__name__}: {error}."
        ) from error
    if missing := [method for method in ("log", "close") if not callable(getattr(tracker, method, None))]:
        raise ConfigError(
            f"trainer.trackers: the tracker of {name} has no method {missing[0]}(); it needs log(step, metrics) and "
            "close(), and may have log_samples(step, samples)."
        )
    return tracker


def _run_id(run: RunDirectory) -> str:
    """Return an id that a run keeps when it goes on, and that a new run in the same directory does not get."""
    first = [start["started_at"] for start in run.starts() if not start.get("after_step")][-1:]
    return hashlib.blake2b(f"{run.path.absolute()} {first}".encode(errors="surrogatepass"), digest_size=8).hexdigest()


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
