"""Snapshots: where they are, when they are taken, and what is left of them."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow.checkpoint import SavedFile, report_files, saved_files
from hybridflow.config import load_config
from hybridflow.controller.ray.reaper import _is_left_snapshot
from hybridflow.errors import CheckpointError, ConfigError, LostWorkerError
from hybridflow.trainers.build.preconditions import require_snapshot_dir
from hybridflow.trainers.run.recovery import snapshots as module
from hybridflow.trainers.run.recovery.snapshots import (
    NAME,
    Snapshots,
    memory_problem,
    remove_left_snapshots,
    snapshot_directory,
)
from hybridflow.trainers.run.training_state import TrainingSaver


class Group:
    """A group of two ranks whose rank 0 writes in the background; `lost`: both died after `reports` reports."""

    def __init__(self, reports=1, lost=False, error=""):
        self.reports, self.lost, self.error = reports, lost, error
        self.saved: list[SavedFile] = []

    def save(self, directory, in_background):
        if self.error:
            raise CheckpointError(self.error)
        self.directory = Path(directory)
        file = self.directory / "actor.json"
        file.write_text("{}")
        self.saved = saved_files(self.directory, [file])
        if self.reports:
            report_files(self.directory, "actor_0", self.saved)
        return [None, []]

    def finish_save(self):
        if self.lost:
            raise LostWorkerError("both ranks are lost")
        return [self.saved, []]


@pytest.fixture
def snapshots(tmp_path):
    """Yield a function that builds snapshots; afterwards nothing is left of them."""

    def build(group=None, every=1, lag=0):
        def saver(store):
            loader = SimpleNamespace(state_dict=dict)
            return TrainingSaver(store, {}, [group or Group()], loader, in_background=True)  # pyright: ignore

        built.append(Snapshots(tmp_path / "hybridflow-snapshots-1-0123abcd", every, lag, saver))
        return built[-1]

    built = []
    yield build
    for each in built:
        each.close()
    assert list(tmp_path.iterdir()) == []


def take(snapshots, step):
    snapshots.begin(step, lambda saver: saver.save(step))


def test_a_snapshot_is_complete_after_the_next_step_and_replaces_the_last(snapshots):
    taken = snapshots()
    for step in range(3):
        taken.finish(step)
        take(taken, step)
    assert taken.store.list() == (1,)
    taken.finish(2)
    assert taken.store.list() == (1,)
    taken.finish(3)
    assert taken.store.list() == (2,)


def test_with_a_lag_a_snapshot_waits_for_the_batches_that_have_begun(snapshots):
    taken = snapshots(lag=3)
    complete = []
    for step in range(8):
        taken.finish(step)
        take(taken, step)
        complete.append(taken.store.list())
    assert complete == [(), (), (), (0,), (0,), (0,), (3,), (3,)]


@pytest.mark.parametrize(("reports", "steps"), [(1, (4,)), (0, ())])
def test_a_snapshot_survives_the_ranks_that_have_written_it(snapshots, reports, steps):
    taken = snapshots(Group(reports=reports, lost=True))
    take(taken, 4)
    taken.rescue()
    assert taken.store.list() == steps
    names = ["actor.json", "checkpoint.json", "controller.json", "controller.safetensors"]
    assert [sorted(path.name for path in taken.store.path(step).iterdir()) for step in steps] == [names] * len(steps)
    assert len(list(taken.store.directory.iterdir())) == len(steps)


def test_a_snapshot_that_cannot_be_written_is_one_warning(snapshots, caplog):
    taken = snapshots(Group(error="no space left"))
    take(taken, 1)
    take(taken, 2)
    assert caplog.text.count("was not written") == 1
    assert "no space left" in caplog.text
    assert "recovery.snapshot_dir names another directory" in caplog.text


def config_of(tmp_path, *changes):
    return load_config(None, [f"trainer.run_dir={tmp_path}/run", *changes])


@pytest.mark.parametrize(("elsewhere", "parent"), [(set(), "/dev/shm"), ({"elsewhere"}, "{run}")])
def test_snapshots_are_in_shared_memory_if_all_workers_are_here(tmp_path, elsewhere, parent):
    directory = snapshot_directory(config_of(tmp_path), {socket.gethostname(), *elsewhere})
    assert str(directory.parent) == parent.format(run=tmp_path / "run")
    assert NAME.fullmatch(directory.name)


@pytest.mark.parametrize(("name", "problem"), [("missing", "is not a directory; create it"), ("file", "is not a")])
def test_a_snapshot_dir_that_does_not_exist_is_an_error(tmp_path, name, problem):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"recovery.snapshot_dir='.*/{name}' {problem}"):
        require_snapshot_dir(config_of(tmp_path, f"recovery.snapshot_dir={tmp_path}/{name}"))
    require_snapshot_dir(config_of(tmp_path, f"recovery.snapshot_dir={tmp_path}"))


def test_snapshots_of_ended_processes_are_removed_and_others_kept(snapshots, tmp_path):
    left, other = tmp_path / "hybridflow-snapshots-99999999-89abcdef", tmp_path / "hybridflow-snapshots-x"
    left.mkdir()
    other.mkdir()
    taken = snapshots()
    take(taken, 0)  # holds its lock
    taken.finish()
    remove_left_snapshots(tmp_path)
    assert not left.exists()
    assert taken.store.list() == (0,)
    other.rmdir()


@pytest.mark.parametrize("is_left", [True, False])
def test_the_reaper_knows_the_directories_of_snapshots(tmp_path, is_left):
    name = f"hybridflow-snapshots-{99999999 if is_left else os.getpid()}-0123abcd"
    assert NAME.fullmatch(name)
    (tmp_path / name).mkdir()
    (entry,) = os.scandir(tmp_path)
    assert _is_left_snapshot(entry) is is_left


SHARED = Path("/dev/shm/hybridflow-snapshots-1-0123abcd")


@pytest.mark.parametrize(
    ("memory", "disk", "directory", "problem"),
    [
        (6 * 600, 2 * 600, SHARED, ""),
        (6 * 600 - 6, 2 * 600, SHARED, "set recovery.snapshot_dir to a directory on a fast disk"),
        (6 * 600 - 6, 2 * 600, None, ""),
        (6 * 600, 2 * 600 - 2, None, "set recovery.snapshot_dir to a larger disk"),
    ],
)
def test_snapshots_that_do_not_fit_are_not_taken(tmp_path, monkeypatch, memory, disk, directory, problem):
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    monkeypatch.setattr(module, "available_memory", lambda: memory)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=disk))
    found = memory_problem(config_of(tmp_path, f"model.path={tmp_path}"), directory or tmp_path / "not yet" / "one")
    assert (problem in found, bool(found)) == (True, bool(problem))
