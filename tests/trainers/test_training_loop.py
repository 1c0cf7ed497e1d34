"""The training loop, with a trainer that records its calls."""

import os
import signal

import pytest

from hybridflow.config import load_config
from hybridflow.observability import read_jsonl
from hybridflow.trainers import RunDirectory, fit
from hybridflow.trainers.samples import Samples


class RecordingTrainer:
    """A trainer that records its calls; SIGTERM is sent during the call `signal_in`."""

    figures = {"loss": "sft/loss"}  # noqa: RUF012
    recovery = slow_ranks = rank_speeds = None

    def __init__(self, config, total_steps, signal_in=None):
        self.config, self.total_steps, self.signal_in = config, total_steps, signal_in
        self.run = RunDirectory(config, "sft")
        self.global_step = 0
        self.metrics = {}
        self.calls = []

    def train_step(self):
        self.global_step += 1
        self.metrics.clear()
        self.metrics["sft/loss"] = 1.0 / self.global_step
        self._record(f"step {self.global_step}")
        return Samples([{"step": self.global_step, "prompt": "p", "response": "r", "score": 1.0}])

    def validate(self):
        self._record(f"validate {self.global_step}")
        return {"sft/val_loss": 2.0}

    def take_events(self):
        return []

    def save(self):
        self._record(f"save {self.global_step}")

    def finish_save(self):
        pass

    def _record(self, call):
        self.calls.append(call)
        if call == self.signal_in:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def make(tmp_path):
    def build(total_steps, *overrides, signal_in=None):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text("{}")
        overrides = [f"trainer.run_dir={tmp_path}/run", f"model.path={tmp_path}/model", *overrides]
        return RecordingTrainer(load_config(None, overrides), total_steps, signal_in)

    return build


def test_a_run_validates_before_and_after_and_saves_at_the_end(make, tmp_path):
    trainer = make(3)
    fit(trainer)
    assert trainer.calls == ["validate 0", "step 1", "step 2", "step 3", "validate 3", "save 3"]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [sorted(row.keys() & {"step", "sft/loss", "sft/val_loss"}) for row in rows] == [
        ["sft/val_loss", "step"],
        ["sft/loss", "step"],
        ["sft/loss", "step"],
        ["sft/loss", "sft/val_loss", "step"],
    ]
    assert [sample["step"] for sample in read_jsonl(tmp_path / "run" / "samples.jsonl")] == [1, 2, 3]


def test_validation_and_saving_come_every_n_steps(make):
    trainer = make(
        5,
        "data.val_files=['v.parquet']",
        "trainer.val_every=2",
        "trainer.save_every=3",
        "trainer.save_every_s=0",
        "trainer.val_before_train=false",
    )
    fit(trainer)
    assert trainer.calls == [
        *("step 1", "step 2", "validate 2", "step 3", "save 3", "step 4", "validate 4"),
        *("step 5", "validate 5", "save 5"),
    ]


def test_each_validation_during_training_is_saved(make):
    trainer = make(5, "data.val_files=['v.parquet']", "trainer.val_every=2")
    fit(trainer)
    assert [call for call in trainer.calls if "step" not in call] == [
        *("validate 0", "validate 2", "save 2", "validate 4", "save 4", "validate 5", "save 5"),
    ]


def test_steps_are_saved_once_the_seconds_have_passed(make):
    trainer = make(3, "trainer.save_every_s=1e-9", "trainer.val_before_train=false")
    fit(trainer)
    assert trainer.calls == ["step 1", "save 1", "step 2", "save 2", "step 3", "validate 3", "save 3"]


def test_an_early_stop_saves_without_validation(make, caplog):
    trainer = make(5, "trainer.val_before_train=false")
    fit(trainer, stop_after=2)
    assert trainer.calls == ["step 1", "step 2", "save 2"]
    assert "stopped after step 2 of 5; run the same command to continue, without --stop-after" in caplog.text
    fit(trainer, stop_after=3)
    assert trainer.calls[3:] == ["step 3", "save 3"]


def test_a_stop_that_is_already_reached_does_nothing(make, caplog):
    trainer = make(5)
    trainer.global_step = 4
    fit(trainer, stop_after=4)
    fit(trainer, stop_after=2)
    fit(trainer, stop_after=0)
    assert trainer.calls == []
    assert caplog.text.count("is already at step 4: nothing to do") == 3


def test_a_stop_after_the_last_step_is_ignored(make):
    trainer = make(1, "trainer.val_before_train=false")
    fit(trainer, stop_after=7)
    assert trainer.calls == ["step 1", "validate 1", "save 1"]


def test_a_finished_run_writes_nothing(make, tmp_path, caplog):
    trainer = make(2)
    trainer.global_step = 2
    fit(trainer)
    assert trainer.calls == []
    assert "is finished: it is at step 2 of 2. Raise trainer.total_steps" in caplog.text
    assert not (tmp_path / "run").exists()


def test_a_signal_in_a_step_finishes_it_and_saves(make):
    trainer = make(5, "trainer.val_before_train=false", signal_in="step 2")
    fit(trainer)
    assert trainer.calls == ["step 1", "step 2", "save 2"]


def test_a_signal_during_a_save_stops_after_the_next_step(make):
    trainer = make(5, "trainer.val_before_train=false", "trainer.save_every=2", signal_in="save 2")
    fit(trainer)
    assert trainer.calls == ["step 1", "step 2", "save 2", "step 3", "save 3"]


def test_a_signal_in_the_first_validation_stops_before_any_step(make):
    trainer = make(5, signal_in="validate 0")
    fit(trainer)
    assert trainer.calls == ["validate 0"]


def test_an_error_restores_the_signal_handlers(make):
    trainer = make(5)
    trainer.save = lambda: 1 / 0
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError):
        fit(trainer, stop_after=1)
    assert signal.getsignal(signal.SIGTERM) == before
