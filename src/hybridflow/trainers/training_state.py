"""Save and restore the state of a training run: worker groups, data position, random state."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.checkpoint import Checkpoint, SavedFile, save_state
from hybridflow.controller import WorkerGroup
from hybridflow.data import BatchLoader
from hybridflow.errors import HybridFlowError
from hybridflow.observability import get_logger
from hybridflow.runtime import capture_random_state, restore_random_state
from hybridflow.trainers.run_directory import RunDirectory

logger = get_logger(__name__)

CONTROLLER = "controller"
"""The checkpoint component of the controller; each worker group writes its own."""


class TrainingSaver:
    """A writer of checkpoints, each of them atomic.

    `in_background`: `save` returns when the state is copied, and training may continue while it is written. `finish`
    completes the checkpoint, as does the next `save`.
    """

    def __init__(
        self, run: RunDirectory, groups: Iterable[WorkerGroup], loader: BatchLoader, *, in_background: bool = False
    ) -> None:
        self._run, self._groups, self._loader, self._in_background = run, list(groups), loader, in_background
        self._open: ExitStack | None = None
        self._saved: list[SavedFile] = []
        self._write_last: Callable[[], None] = _do_nothing
        self._step = 0

    def save(self, step: int, write_last: Callable[[Path], None] | None = None, **more: Any) -> None:
        """Write the checkpoint of a step, or begin to; `more` is added to its state. Raises CheckpointError.

        `write_last` writes further files into the directory, when the groups have written theirs.
        """
        self.finish()
        with ExitStack() as stack:
            self._saved = []
            directory = stack.enter_context(self._run.store.begin(step, self._run.identity, self._saved))
            stack.push(self._wait_for_groups_on_error)
            for group in self._groups:
                self._note(group.save(str(directory), in_background=self._in_background))
            state = {"global_step": step, "loader": self._loader.state_dict(), "random": capture_random_state(), **more}
            save_state(state, directory / CONTROLLER)
            self._write_last = partial(write_last, directory) if write_last else _do_nothing
            self._open, self._step = stack.pop_all(), step
        if not self._in_background:
            self.finish()

    def _wait_for_groups_on_error(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error in one group, wait for the writes of the others, before their directory is removed."""
        for group in self._groups if kind is not None and self._in_background else ():
            with suppress(HybridFlowError):  # the first error is the one that is raised
                group.finish_save()

    def finish(self) -> None:
        """Complete a pending save, if any. Raises CheckpointError, which loses only this save."""
        stack, self._open = self._open, None
        if stack is None:
            return
        with stack:
            for group in self._groups if self._in_background else ():
                self._note(group.finish_save())
            self._write_last()
        logger.debug("saved '%s'", self._run.store.path(self._step))

    def _note(self, files_of_ranks: Iterable[Sequence[SavedFile] | None] | None) -> None:
        """Record the files that the ranks of a group report; others are hashed by this process."""
        for files in files_of_ranks or ():
            self._saved += files or ()


def _do_nothing() -> None:
    """Do nothing: no further file."""


def restore_training(checkpoint: Checkpoint, groups: Iterable[WorkerGroup], loader: BatchLoader) -> dict[str, Any]:
    """Restore groups, loader and random state from a checkpoint; return the controller's state.

    Raises CheckpointError if the weights do not fit, DataError if the data differs.
    """
    state = checkpoint.load(CONTROLLER)
    loader.load_state_dict(state["loader"])
    for group in groups:
        group.load(str(checkpoint.directory))
    restore_random_state(state["random"])
    return state
