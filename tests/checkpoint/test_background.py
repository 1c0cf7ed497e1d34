"""Copies of states for background saves; `tests/engines/test_training_step_gpu.py` makes them from a GPU.

`test_sharded_state` writes copies of the shards of several ranks.
"""

import threading

import pytest
import torch

from hybridflow.checkpoint import BackgroundSave, StateCopy, copy_state, save_state


def state_of(offset=0.0):
    whole = torch.arange(12.0) + offset
    return {
        "num_updates": 2,
        "model": {"a": whole[:6].view(2, 3), "b": whole[6:].view(3, 2).T, "c": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": [({"step": torch.tensor(3.0)}, torch.zeros(0))],
    }


def test_a_copy_has_the_same_bytes_on_disk(tmp_path):
    state = state_of()
    copy = copy_state(state)
    for directory, saved in (("state", state), ("copy", copy)):
        (tmp_path / directory).mkdir()
        save_state(saved, tmp_path / directory / "actor")
    for name in ("actor.safetensors", "actor.json"):
        assert (tmp_path / "state" / name).read_bytes() == (tmp_path / "copy" / name).read_bytes()


def test_a_copy_does_not_change_with_its_state():
    state = state_of()
    copy = copy_state(state)
    state["model"]["a"].zero_()
    state["optimizer"][0][0]["step"].add_(1)
    assert copy["model"]["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copy["optimizer"][0][0]["step"].item() == 3
    assert copy["optimizer"][0][1].shape == (0,)


def test_the_memory_of_a_copy_is_reused_by_the_next_one():
    copy_of = StateCopy()
    first, second = copy_of(state_of()), copy_of(state_of(1.0))
    assert first["model"]["a"].data_ptr() == second["model"]["a"].data_ptr()
    assert second["model"]["b"].tolist() == [[7, 9, 11], [8, 10, 12]]
    larger = copy_of(state_of() | {"more": torch.ones(5)})
    assert larger["more"].tolist() == [1] * 5


def test_the_thread_of_a_save_uses_the_device_of_its_process(monkeypatch):
    """CUDA gives a new thread the first device, on which the save of every rank would otherwise take memory."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.get_ident())))
    [(device, thread)] = BackgroundSave(lambda: list(chosen)).finish()
    assert device == 3
    assert thread != threading.get_ident()


def test_without_a_thread_the_state_is_written_at_once(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    def fail():
        raise OSError("no space")

    monkeypatch.setattr(threading.Thread, "start", start)
    written: list[int] = []
    save = BackgroundSave(lambda: written.append(1) or 7)
    assert written == [1]
    assert save.finish() == 7
    failed = BackgroundSave(fail)
    with pytest.raises(OSError, match="no space"):
        failed.finish()
