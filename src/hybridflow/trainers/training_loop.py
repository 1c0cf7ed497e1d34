"""The loop around the steps of any trainer: when it validates, writes, saves and stops. Knows no algorithm."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from hybridflow.config import Config
from hybridflow.errors import HybridFlowError, WorkerError
from hybridflow.observability import TraceEvent, get_logger, memory_bytes
from hybridflow.runtime import StopRequest
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.run_log import RunLog, Sample
from hybridflow.trainers.save_schedule import SaveSchedule

logger = get_logger(__name__)


class Trainer(Protocol):
    """What the loop needs of a trainer. `metrics` are those of the present step."""

    config: Config
    run: RunDirectory
    total_steps: int
    global_step: int
    metrics: dict[str, Any]

    @property
    def figures(self) -> Mapping[str, str]:
        """What the console shows: label -> metric."""
        ...

    def train_step(self) -> list[Sample]:
        """Take the next batch, learn from it, count the step, fill `metrics` anew; returns samples to show."""
        ...

    def take_events(self) -> list[TraceEvent]:
        """The trace since the last time it was taken."""
        ...

    def validate(self) -> dict[str, float]:
        """The metrics of the present weights on validation data; empty without any."""
        ...

    def save(self) -> None:
        """Write a checkpoint of everything that reaches a number, or begin to: `finish_save` completes it."""
        ...

    def finish_save(self) -> None:
        """Wait until the save that was begun is a checkpoint."""
        ...


def fit(trainer: Trainer, stop_after: int | None = None) -> None:
    """Train from where the trainer is to its last step, or to step `stop_after` if that comes first.

    Ctrl-C or SIGTERM finishes the step, saves and returns; a second one ends the process at once.
    """
    how, last_step = trainer.config.trainer, trainer.total_steps
    if stop_after is not None:
        last_step = min(last_step, stop_after)
    if trainer.global_step >= last_step:
        _say_nothing_is_left(trainer)
        return
    log = RunLog(trainer.run, total_steps=trainer.total_steps, figures=trainer.figures)
    saves = SaveSchedule(how)
    with log, StopRequest() as stop, _completing_saves(trainer):
        if trainer.global_step == 0 and how.val_before_train:
            log.write(0, trainer.validate(), events=trainer.take_events())
        stopping = stop.requested
        while not stopping:
            samples = trainer.train_step()
            trainer.finish_save()  # that of the step before, written beside this one
            step, validation = trainer.global_step, {}
            if step == trainer.total_steps or (how.val_every and step % how.val_every == 0):
                validation = trainer.validate()
                trainer.metrics |= validation
            trainer.metrics |= {f"memory_bytes/{kind}": size for kind, size in memory_bytes().items()}
            # before saving: a row is lost with its checkpoint, never alone
            log.write(step, trainer.metrics, samples, trainer.take_events())
            stopping = step >= last_step or stop.requested  # asked once: a later signal stops after the next step
            if stopping or saves.is_due(step, has_validated=bool(validation)):
                trainer.save()
                saves.restart()
    if trainer.global_step < trainer.total_steps:
        logger.warning(
            "stopped after step %d of %d; the same command continues from there",
            trainer.global_step,
            trainer.total_steps,
        )


@contextmanager
def _completing_saves(trainer: Trainer) -> Iterator[None]:
    """A save that was begun becomes a checkpoint, also where an error ends the loop; says where a run can go on."""
    try:
        yield
    except Exception:
        try:
            trainer.finish_save()
        except WorkerError:  # which is what is raised already
            logger.error("the checkpoint that was being written is lost")
        except HybridFlowError as error:
            logger.error("the checkpoint that was being written is lost: %s", error)
        if steps := trainer.run.store.list():
            logger.error("the newest checkpoint is that of step %d; the same command continues from there", steps[-1])
        raise
    trainer.finish_save()


def _say_nothing_is_left(trainer: Trainer) -> None:
    step, total_steps = trainer.global_step, trainer.total_steps
    if step < total_steps:
        logger.warning("'%s' is at step %d already: nothing to do before it stops", trainer.run.path, step)
    else:
        logger.warning(
            "'%s' is finished: it is at step %d of %d. Raise trainer.total_steps (or trainer.epochs) to train on, "
            "or choose another trainer.run_dir",
            trainer.run.path,
            step,
            total_steps,
        )
