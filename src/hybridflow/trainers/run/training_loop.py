"""The training loop around the steps of any trainer: validation, logs, checkpoints, signals. Knows no algorithm."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hybridflow.config import Config, TrainerConfig
from hybridflow.errors import CheckpointConfigError, HybridFlowError, WorkerError
from hybridflow.runtime.cores import CoreUse
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.observe import get_logger, memory_bytes
from hybridflow.runtime.observe.slow_start import named_if_slow
from hybridflow.runtime.stop_signals import StopRequest
from hybridflow.trainers.build.groups import groups_of_pools
from hybridflow.trainers.run.recovery.recovery import recovering
from hybridflow.trainers.run.run_log import RunLog
from hybridflow.trainers.run.samples import Samples
from hybridflow.trainers.run.trainer import Trainer


def train_step(trainer: Trainer) -> Samples:
    """Make the trainer's next step, and write its profile if that is configured. Results do not depend on it."""
    how, step = trainer.config.trainer, trainer.global_step + 1
    if step not in how.profile_steps:
        return trainer.train_step()
    groups = groups_of_pools(trainer.config, trainer.groups, "begin_profile")
    for group in groups:
        group.begin_profile(how.profile_ranks)
    samples = trainer.train_step()
    directory = Path(how.run_dir, "profile", f"step_{step:06d}")
    for group in groups:
        group.end_profile(str(directory), group.name)
    logger.info("wrote the profile of step %d to '%s'", step, directory)
    return samples


class SaveTimes:
    """Saves every `save_every` steps; with `save_every_s` also after that many seconds and with each validation."""

    def __init__(self, settings: TrainerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_steps, self._every_s, self._clock = settings.save_every, settings.save_every_s, clock
        self._last_save = clock()

    def is_due(self, step: int, *, has_validated: bool) -> bool:
        """Return whether to save after `step`."""
        if self._every_steps and step % self._every_steps == 0:
            return True
        return self._every_s > 0 and (has_validated or self._clock() - self._last_save >= self._every_s)

    def restart(self) -> None:
        """Count the seconds from now, the end of a save."""
        self._last_save = self._clock()


class CrowdWatch:
    """A context of each step; in the first ones it notices other programs on the cores, and logs them once."""

    def __init__(self, config: Config) -> None:
        """Watch unless the workers are on a cluster of others, whose processes this one does not know."""
        self._num_left = 0 if config.controller.address else CROWD_STEPS

    def __enter__(self) -> None:
        self._use = CoreUse() if self._num_left else None

    def __exit__(self, *_: object) -> None:
        self._num_left -= self._num_left > 0
        if self._use and self._use.read().is_full and self._use.text:
            self._num_left = 0
            logger.info("%s, so that a step takes longer than it would alone", self._use.text)


CROWD_STEPS = 5
"""Steps of a start in which other programs are looked for."""

logger = get_logger(__name__)


def fit(trainer: Trainer, stop_after: int | None = None) -> None:
    """Train from the current step to the last one, or to step `stop_after` if that comes first.

    Ctrl-C or SIGTERM finishes the step, saves and returns; a second one ends the process at once.
    """
    how, last_step = trainer.config.trainer, trainer.total_steps
    if stop_after is not None:
        last_step = min(last_step, stop_after)
    if trainer.global_step >= last_step:
        _log_nothing_to_do(trainer)
        return
    log = RunLog(trainer.run, total_steps=trainer.total_steps, figures=trainer.figures)
    saves, recovery = SaveTimes(how), trainer.recovery
    with log, StopRequest() as stop, _completing_saves(trainer):
        is_begun, stopping, crowding = False, False, CrowdWatch(trainer.config)
        while not stopping:
            with recovering(recovery, lambda: log.rewind(trainer.global_step)):
                how_long = nullcontext() if is_begun else named_if_slow(f"step {trainer.global_step + 1}")
                if not is_begun:
                    with named_if_slow("validating before the first step"):
                        _begin(trainer, log)
                    is_begun = True
                    if stop.requested:
                        break
                with how_long, crowding:
                    stopping = _train_one_step(trainer, log, saves, lambda step: step >= last_step or stop.requested)
    if trainer.global_step < trainer.total_steps:
        logger.warning(
            "stopped after step %d of %d; run the same command to continue%s",
            trainer.global_step,
            trainer.total_steps,
            "" if stop.requested else ", without --stop-after",
        )


def _begin(trainer: Trainer, log: RunLog) -> None:
    """Take the snapshot of the state before the first step; validate there in a new run."""
    if trainer.recovery:
        trainer.recovery.take_snapshot()
    if trainer.global_step == 0 and trainer.config.trainer.val_before_train:
        log.write(0, trainer.validate(), events=trainer.take_events())


def _train_one_step(trainer: Trainer, log: RunLog, saves: SaveTimes, is_last: Callable[[int], bool]) -> bool:
    """Make a step, validate, log and save as configured; return whether the run stops, which `is_last(step)` tells."""
    how, recovery = trainer.config.trainer, trainer.recovery
    fault_point("step", trainer.global_step + 1)
    samples = train_step(trainer)
    trainer.finish_save()  # the background save of the step before
    if recovery:
        trainer.metrics |= recovery.note_step()
    if trainer.rank_speeds:
        trainer.rank_speeds.note_step(trainer.metrics["timing_s/step"])
    step, validation = trainer.global_step, {}
    if step == trainer.total_steps or (how.val_every and step % how.val_every == 0):
        validation = trainer.validate()
        trainer.metrics |= validation
    trainer.metrics |= {f"memory_bytes/{kind}": size for kind, size in memory_bytes().items()}
    # before saving: every checkpoint has its row
    log.write(step, trainer.metrics, samples, trainer.take_events())
    stops = is_last(step)  # read once: a later signal stops after the next step
    if stops or saves.is_due(step, has_validated=bool(validation)):
        if recovery:
            recovery.snapshots.finish()  # each rank writes one state at a time
        fault_point("log")
        trainer.save()
        saves.restart()
    elif recovery:
        recovery.begin_snapshot()
    if recovery and not stops:
        recovery.use_room()
    return stops


@contextmanager
def _completing_saves(trainer: Trainer) -> Iterator[None]:
    """Finish a pending save even if the loop raises; then also log the step to resume from."""
    try:
        yield
    except Exception:
        try:
            trainer.finish_save()
        except WorkerError:  # the error that ended the loop
            logger.error("the checkpoint that was being written is lost")
        except HybridFlowError as error:
            logger.error("the checkpoint that was being written is lost: %s", error)
        if steps := trainer.run.store.list():
            logger.error(
                "the newest checkpoint is that of step %d; run the same command to continue from there", steps[-1]
            )
        raise
    trainer.finish_save()


FREE = ("model.dtype", "trainer.total_steps", "trainer.epochs", "trainer.resume", "trainer.run_dir", "trainer.trackers")
"""Keys that may change when a run is at its last step; all keys of `FREE_SECTIONS` may change too."""

FREE_SECTIONS = ("controller.", "placement.", "recovery.")


def _log_nothing_to_do(trainer: Trainer) -> None:
    """Log why there is no step to make. Raises CheckpointConfigError if settings changed that would have no effect."""
    step, total_steps, run = trainer.global_step, trainer.total_steps, trainer.run
    before = run.checkpoint.info["config"] if run.checkpoint else {}
    started_in = next((start.get("directory", "") for start in reversed(run.starts())), "")
    changed = [
        f"{key} was {before[key]!r} and is {value!r}"
        for key, value in run.identity["config"].items()
        if key in before and key not in FREE and not key.startswith(FREE_SECTIONS)
        if before[key] != value and _absolute(before[key], started_in) != _absolute(value, "")
    ]
    if changed:
        raise CheckpointConfigError(
            f"'{run.path}' is at step {step} already, so that other settings have no effect: {'; '.join(changed)}. "
            f"Raise trainer.total_steps above {step} to train on with them, or choose another trainer.run_dir."
        )
    if step < total_steps:
        logger.warning(
            "'%s' is already at step %d: nothing to do. Remove --stop-after, or name a later step", run.path, step
        )
    else:
        logger.warning(
            "'%s' is finished: it is at step %d of %d. Raise trainer.total_steps (or trainer.epochs) to continue, "
            "or choose another trainer.run_dir",
            *(run.path, step, total_steps),
        )


def _absolute(value: Any, directory: str) -> Any:
    """Return a value with its texts, which may be paths, as absolute paths; equal texts stay equal."""
    if isinstance(value, list):
        return [_absolute(each, directory) for each in value]
    return os.path.abspath(os.path.join(directory, value)) if isinstance(value, str) else value
