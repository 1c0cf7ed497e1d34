"""The controller's part of updates in flight: what they need, and the log of the schedule."""

import os
from functools import cached_property

from hybridflow.config import Config
from hybridflow.config.checks.generation import GREEDY_IN_FLIGHT
from hybridflow.controller import WorkerGroup
from hybridflow.errors import ConfigError
from hybridflow.runtime.observe import JsonlWriter
from hybridflow.trainers.run.run_directory import RunDirectory
from hybridflow.workers.algorithm_functions import reads_column
from hybridflow.workers.engine_schedule import SCHEDULE, read_schedule


def require_in_flight(config: Config) -> None:
    """Raise ConfigError if updates in flight cannot serve the estimator, or if the schedule cannot be read."""
    if config.updates_in_flight and reads_column(config, "baseline_scores"):
        raise ConfigError(f"{GREEDY_IN_FLIGHT.problem(config)}.")
    if replay := config.rollout.replay:
        if os.path.realpath(replay) == os.path.realpath(config.trainer.run_dir):
            raise ConfigError(
                f"rollout.replay={replay!r} is trainer.run_dir, whose schedule this run writes; set another "
                "trainer.run_dir."
            )
        read_schedule(replay)


class EngineScheduleLog:
    """A function that appends the events of the engines to `schedule.jsonl`, with the step; see `EngineSchedule`."""

    def __init__(self, config: Config, run: RunDirectory, rollout: WorkerGroup) -> None:
        self._config, self._run, self._rollout = config, run, rollout

    def __call__(self, step: int) -> None:
        """Append the events since the last call; nothing without updates in flight."""
        if self._config.updates_in_flight:
            rows = [row for of_rank in self._rollout.take_schedule() for row in of_rank]
            self._file.write_all({"step": step, **row} for row in rows)

    @cached_property
    def _file(self) -> JsonlWriter:
        """The file, without the rows of steps that a resumed run repeats."""
        writer = JsonlWriter(self._run.path / SCHEDULE)
        writer.truncate_after(self._run.step if self._run.checkpoint else -1)
        return writer
