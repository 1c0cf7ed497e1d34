from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow.checkpoint import CheckpointStore
from hybridflow.errors import CheckpointError
from hybridflow.trainers.run.training_state import TrainingSaver


class Group:
    """A worker group whose save starts, or fails."""

    def __init__(self, *, fails: bool = False, ends_with: str = "") -> None:
        self.fails, self.ends_with, self.found = fails, ends_with, None

    def save(self, directory: str, in_background: bool) -> None:
        self.directory = Path(directory)
        if self.fails:
            raise CheckpointError("no room")

    def finish_save(self) -> None:
        self.found = self.directory.is_dir()
        if self.ends_with:
            raise CheckpointError(self.ends_with)


def saver_of(tmp_path, *groups):
    loader = SimpleNamespace(state_dict=dict)
    return TrainingSaver(CheckpointStore(tmp_path / "checkpoints"), {}, groups, loader, in_background=True)


@pytest.mark.parametrize("when", ["begin", "end"])
def test_other_groups_finish_before_the_directory_is_removed(tmp_path, when):
    writing, failing = Group(), Group(fails=when == "begin", ends_with="no room" if when == "end" else "")
    saver = saver_of(tmp_path, failing, writing)  # the last one saves first
    if when == "end":
        saver.save(3)
    with pytest.raises(CheckpointError, match="no room"):
        saver.save(3) if when == "begin" else saver.finish()
    assert writing.found
    assert not list((tmp_path / "checkpoints").iterdir())


def test_the_next_save_completes_the_previous_one(tmp_path):
    saver = saver_of(tmp_path, Group())
    saver.save(3)
    assert saver._store.list() == ()
    saver.save(4)
    assert saver._store.list() == (3,)
    saver.finish()
    assert saver._store.list() == (3, 4)
