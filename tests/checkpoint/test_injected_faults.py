"""Faults in a save: a flipped bit of a file is found when the checkpoint is opened, also after a background save."""

import pytest
import torch
from support.faults import plan_faults

from hybridflow.checkpoint import BackgroundSave, CheckpointStore, save_state, saved_files
from hybridflow.errors import CheckpointError
from hybridflow.runtime.fault_points import FAULTS_VARIABLE, current_worker, fault_point


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Return a function that saves a checkpoint of step 1, as the worker actor/0, with one planned fault."""

    def save(fault):
        monkeypatch.setenv(FAULTS_VARIABLE, plan_faults(tmp_path, [fault]))
        fault_point("step", 1)
        store, saved = CheckpointStore(tmp_path / "checkpoints"), []
        with store.begin(1, {}, saved) as directory:

            def write():
                return saved_files(directory, save_state({"weight": torch.ones(3)}, directory / "actor"))

            token = current_worker.set("actor/0")
            writing = BackgroundSave(write)
            current_worker.reset(token)
            saved += writing.finish()
        return store

    return save


def test_a_bit_that_flips_after_hashing_is_found_at_the_next_start(save):
    store = save("1: corrupt actor/0 in save")
    with pytest.raises(CheckpointError, match=r"actor\.safetensors' is damaged: its SHA-256 is"):
        store.latest()


def test_a_full_disk_in_a_background_save_loses_that_save_only(save, tmp_path):
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 1 was not saved: .*No space left on device"):
        save("1: disk actor/0 in save")
    assert list((tmp_path / "checkpoints").iterdir()) == []
