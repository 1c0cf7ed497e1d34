"""Save and restore the state of a training run: worker groups, data position, random state."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.checkpoint import Checkpoint, CheckpointStore, SavedFile, save_state, take_reports
from hybridflow.controller import WorkerGroup
from hybridflow.data import BatchLoader
from hybridflow.errors import CheckpointError, HybridFlowError
from hybridflow.runtime.alike import require_alike
from hybridflow.runtime.files import describe_bytes
from hybridflow.runtime.observe import get_logger
from hybridflow.runtime.random_state import capture_random_state, restore_random_state

logger = get_logger(__name__)

CONTROLLER = "controller"
"""The checkpoint component of the controller; each worker group writes its own."""


class TrainingSaver:
    """A writer of checkpoints, each of them atomic.

    `in_background`: `save` returns when the state is copied, and training may continue while it is written. `finish`
    completes the checkpoint, as does the next `save`.
    """

    def __init__(
        self,
        store: CheckpointStore,
        identity: dict[str, Any],
        groups: Iterable[WorkerGroup],
        loader: BatchLoader,
        *,
        in_background: bool = False,
    ) -> None:
        """Save into `store` the state of the groups that have one; `identity` is recorded in each checkpoint."""
        self._store, self._identity = store, identity
        self._groups, self._loader, self._in_background = list(groups), loader, in_background
        self._open: ExitStack | None = None
        self._saved: list[SavedFile] = []
        self._directory = Path()
        self._num_reports = 0
        self._write_last: Callable[[], None] = lambda: None
        self._step = 0
        self.num_kept = 0
        """Checkpoints of a run that are kept; 0: these are snapshots, or the log has their size."""

    def save(self, step: int, write_last: Callable[[Path], None] | None = None, **more: Any) -> None:
        """Write the checkpoint of a step, or begin to; `more` is added to its state. Raises CheckpointError.

        `write_last` writes further files into the directory, when the groups have written theirs.
        """
        self.finish()
        with ExitStack() as stack:
            self._saved, self._num_reports = [], 0
            directory = self._directory = stack.enter_context(self._store.begin(step, self._identity, self._saved))
            stack.push(self._wait_for_groups_on_error)
            for group in reversed(self._groups):  # the models last: their ranks go on writing
                self._note(group.save(str(directory), in_background=self._in_background))
            state = {"global_step": step, "loader": self._loader.state_dict(), "random": capture_random_state(), **more}
            save_state(state, directory / CONTROLLER)
            self._write_last = partial(write_last, directory) if write_last else lambda: None
            self._open, self._step = stack.pop_all(), step
        if not self._in_background:
            self.finish()

    def _wait_for_groups_on_error(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error on one rank, wait for the writes of the others, before their directory is removed."""
        for group in self._groups if kind is not None else ():
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
            take_reports(self._directory)
            self._write_last()
        path = self._store.path(self._step)
        logger.debug("saved '%s'", path)
        if self.num_kept:
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            kept = "one of them is" if self.num_kept == 1 else f"{self.num_kept} of them are"
            logger.info(
                "a checkpoint of this run has %s; %s kept (trainer.keep_checkpoints)", describe_bytes(size), kept
            )
            self.num_kept = 0

    def rescue(self) -> None:
        """Complete a pending save if all its files were written, although their ranks may be lost; else abandon it."""
        stack, self._open = self._open, None
        if stack is None:
            return
        with suppress(HybridFlowError), stack:
            reports = take_reports(self._directory)
            if len(reports) < self._num_reports:
                raise CheckpointError("a rank was lost while it wrote")
            self._note(reports)
            self._write_last()

    def _note(self, files_of_ranks: Iterable[Sequence[SavedFile] | None] | None) -> None:
        """Record the files that the ranks of a group report; others are hashed by this process."""
        for files in files_of_ranks or ():
            self._saved += files or ()
            self._num_reports += files is None


def restore_training(
    checkpoint: Checkpoint, groups: Iterable[WorkerGroup], loader: BatchLoader, *, verify: bool = False
) -> dict[str, Any]:
    """Restore groups, loader and random state from a checkpoint; return the controller's state.

    With `verify`, compare the state that the groups have then with the checkpoint. Raises CheckpointError if the
    weights do not fit or differ, DataError if the data differs.
    """
    state, place = checkpoint.load(CONTROLLER), f"the state '{checkpoint.directory / CONTROLLER}'"
    require_alike(state, {"global_step": 0, "loader": {}, "random": {}}, place)
    loader.load_state_dict(state["loader"])
    for group in groups:
        group.load(str(checkpoint.directory))
        if verify:
            group.verify(str(checkpoint.directory))
    restore_random_state(state["random"], f"{place}['random']")
    return state
