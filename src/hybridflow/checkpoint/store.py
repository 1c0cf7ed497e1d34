"""The checkpoints of a run: one directory per saved step, written atomically; only the newest are kept."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.manifest import check_info, read_manifest, write_manifest
from hybridflow.checkpoint.partial_directory import partial_directory, remove_directory, remove_leftovers
from hybridflow.checkpoint.saved_files import SavedFile
from hybridflow.checkpoint.state_files import load_state, read_tree
from hybridflow.checkpoint.stored_tensors import StoredTensors
from hybridflow.errors import CheckpointConfigError, CheckpointError
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.files import describe_bytes, describe_free_space

logger = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, with the writer's `info` and the `components` that `load` accepts."""

    directory: Path
    step: int
    info: dict[str, Any]
    components: tuple[str, ...]

    def load(self, component: str, key: str | None = None) -> Any:
        """Load the state of one component, with tensors on the CPU; with `key`, load only that entry."""
        return load_state(self.path_of(component), key)

    def path_of(self, component: str) -> Path:
        """Return the path of a component for `load_state`. Raises CheckpointError if the component does not exist."""
        if component not in self.components:
            raise CheckpointError(
                f"'{self.directory}' has no component '{component}'; it has {', '.join(self.components)}."
            )
        return self.directory / component


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Verify the hashes of all files of a checkpoint and open it.

    Raises CheckpointError, with the file's name, if one is missing, damaged, foreign or of a newer format version.
    """
    directory = Path(directory)
    manifest = read_manifest(directory, verify_hashes=True)
    trees = (name.removesuffix(".json") for name in manifest.files if name.endswith(".json"))
    with_tensors = {name.removesuffix(".safetensors") for name in manifest.files}
    with_tensors |= {name.split("/")[0] for name in manifest.files if "/" in name}  # folders of shards
    components = tuple(name for name in trees if name in with_tensors)
    return Checkpoint(directory, manifest.step, manifest.info, components)


class CheckpointStore:
    """The directory `checkpoints/` of a run, with one directory `step_000020` per checkpoint.

    Opening a store removes partial directories of killed saves; one whose writer is alive is kept. Raises
    CheckpointConfigError if `directory` exists and is not a directory (so a link), or if `keep` is not positive.
    """

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise CheckpointConfigError(f"keep={keep} is invalid: expected a positive number of checkpoints to keep.")
        self.directory = Path(directory)
        self.keep = keep
        self._known_valid: set[int] = set()
        if os.path.lexists(self.directory) and (self.directory.is_symlink() or not self.directory.is_dir()):
            raise CheckpointConfigError(
                f"'{self.directory}' is not a directory, so it has no checkpoints and none can be saved there; move it "
                "away."
            )
        self._remove_leftovers()

    def path(self, step: int) -> Path:
        """Return the directory for the checkpoint of a step, whether it exists or not."""
        return self.directory / f"step_{step:06d}"

    @contextmanager
    def begin(self, step: int, info: dict[str, Any] | None = None, saved: Sequence[SavedFile] = ()) -> Iterator[Path]:
        """Yield a directory for `save_state`; when the block succeeds it becomes the checkpoint of `step`, atomically.

        `info` is a JSON dictionary about the checkpoint. `saved` are files that other processes have written and
        hashed; the caller may extend it until the block ends. The other files are hashed here. A checkpoint of the same
        step is replaced, and old ones are pruned. If the block or the disk fails, or a file of `saved` is not visible
        here, the new checkpoint is removed and earlier ones are unchanged; OSError and CheckpointError are raised as a
        CheckpointError that says so, other errors unchanged.
        """
        if step < 0:
            raise CheckpointError(f"step={step} is invalid: expected 0 or a positive number.")
        check_info(info or {})
        self._remove_leftovers()
        try:
            with partial_directory(self.path(step)) as partial:
                try:
                    yield partial
                    write_manifest(partial, step, info or {}, saved)
                    fault_point("publish")
                except OSError as error:
                    written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
                    space = f"{describe_bytes(written)} were written, {describe_free_space(partial)}"
                    raise CheckpointError(f"{error} ({space})") from error
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} was not saved: {str(error).rstrip('.')}. {self._describe_earlier()}"
            ) from error
        self._known_valid.add(step)
        self.prune()

    def list(self) -> tuple[int, ...]:
        """Return the steps that have a checkpoint directory, in ascending order, without verifying them."""
        if not self.directory.is_dir():
            return ()
        matches = [_STEP_NAME.fullmatch(path.name) for path in self.directory.iterdir()]
        steps = sorted(int(match[1]) for match in matches if match)
        return tuple(step for step in steps if self.path(step).is_dir())

    def open(self, step: int) -> Checkpoint:
        """Verify and open the checkpoint of a step.

        Raises CheckpointError, with the damaged file and the newest valid checkpoint before this one.
        """
        if step not in self.list():
            found = f"there are {', '.join(map(str, self.list()))}" if self.list() else "there are none"
            raise CheckpointConfigError(f"there is no checkpoint of step {step} in '{self.directory}'; {found}.")
        try:
            return self.verify(step)
        except CheckpointError as error:
            raise CheckpointError(f"{str(error).rstrip('.')}. {self._offer_before(step)}") from error

    def verify(self, step: int) -> Checkpoint:
        """Verify and open the checkpoint of a step, as `open` does. The CheckpointError names only what is damaged."""
        self._known_valid.discard(step)
        if self.path(step).is_symlink():
            raise CheckpointError(
                f"'{self.path(step)}' is a symbolic link, not a directory: what it leads to may change or belong to "
                "another run."
            )
        checkpoint = open_checkpoint(self.path(step))
        if checkpoint.step != step:
            raise CheckpointError(
                f"'{self.path(step)}' holds the checkpoint of step {checkpoint.step}; rename it back."
            )
        self._known_valid.add(step)
        return checkpoint

    def latest(self) -> Checkpoint | None:
        """Verify and open the newest checkpoint; None if there is none. Raises CheckpointError as `open` does."""
        steps = self.list()
        return self.open(steps[-1]) if steps else None

    def prune(self) -> None:
        """Delete complete checkpoints except the newest `keep` and the newest valid one.

        Links and checkpoints with a missing or truncated file are not counted and not deleted, so that they can be
        examined.
        """
        surplus = [step for step in reversed(self.list()) if self._is_complete(step)][self.keep :]
        newest_valid = self._newest_valid(self.list()) if surplus else None
        for step in surplus:
            if step == newest_valid:
                continue
            try:
                remove_directory(self.path(step))
            except OSError as error:
                logger.warning("could not prune '%s' (%s); remove it by hand.", self.path(step), error)
            self._known_valid.discard(step)

    def _is_complete(self, step: int) -> bool:
        if self.path(step).is_symlink():
            return False
        try:
            return read_manifest(self.path(step), verify_hashes=False).step == step
        except CheckpointError:
            return False

    def _newest_valid(self, steps: tuple[int, ...]) -> int | None:
        for step in reversed(steps):
            if step in self._known_valid:
                return step
            try:
                return self.verify(step).step
            except CheckpointError:
                continue
        return None

    def _offer_before(self, step: int) -> str:
        valid = self._newest_valid(tuple(other for other in self.list() if other < step))
        if valid is None:
            return "No earlier checkpoint is valid; start again in an empty trainer.run_dir."
        return (
            f"The newest valid checkpoint before it is '{self.path(valid)}'. To continue from there, move "
            f"'{self.path(step)}' out of '{self.directory}' and run again with trainer.resume=auto."
        )

    def _describe_earlier(self) -> str:
        if steps := self.list():
            return f"Earlier checkpoints are untouched, the newest is '{self.path(steps[-1])}'."
        return "There is no earlier one."

    def _remove_leftovers(self) -> None:
        for path in remove_leftovers(self.directory, _STEP_NAME):
            logger.info("removed '%s', which an unfinished save left.", path)


@contextmanager
def stored_weights(source: str | Path | Checkpoint, component: str = "actor") -> Iterator[tuple[StoredTensors, Any]]:
    """Yield the weights of a checkpoint's component, and its `lora` entry; None: the weights are complete.

    Raises CheckpointError if the component does not exist or holds no weights, or if one is not stored as a float.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    path = checkpoint.path_of(component)
    tree = read_tree(path.with_name(path.name + ".json"))
    weights = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(w, dict) and "$tensor" in w for w in weights.values()):
        raise CheckpointError(f"'{path}.json' has no weights under 'model'; hybridflow's training writes them there.")
    with StoredTensors(path) as tensors:
        names = {name: entry["$tensor"] for name, entry in weights.items()}
        if missing := [name for name, stored in names.items() if stored not in tensors]:
            raise CheckpointError(f"the tensors of '{path}' lack {missing[0]}.")
        for name, stored in names.items():
            if not (dtype := tensors.dtype(stored)).is_floating_point:
                raise CheckpointError(
                    f"the weight '{name}' of '{path}' is stored as {dtype}, but training saves floats; "
                    "hybridflow's training did not write it."
                )
        yield tensors.renamed(names), tree.get("lora")
