import os
import signal
from types import SimpleNamespace

import pytest

from hybridflow.config import load_config
from hybridflow.errors import CheckpointConfigError
from hybridflow.trainers import RunDirectory, fit
from hybridflow.trainers.run.samples import Samples


class RecordingTrainer:
    """A trainer that records its calls; SIGTERM is sent during the call `signal_in`."""

    figures = {"loss": "sft/loss"}  # noqa: RUF012
    recovery = rank_speeds = None

    def __init__(self, config, total_steps, signal_in=None):
        self.config, self.total_steps, self.signal_in = config, total_steps, signal_in
        self.run = RunDirectory(config, "sft")
        self.global_step, self.metrics, self.calls = 0, {}, []

    def train_step(self):
        self.global_step += 1
        self._record("step")
        return Samples()

    def validate(self):
        self._record("validate")
        return {"sft/val_loss": 2.0}

    def take_events(self):
        return []

    def save(self):
        self._record("save")

    def finish_save(self):
        pass

    def _record(self, call):
        self.calls.append(f"{call} {self.global_step}")
        if self.calls[-1] == self.signal_in:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def make(tmp_path, model_dir):
    def build(total_steps, *overrides, signal_in=None):
        overrides = [f"trainer.run_dir={tmp_path}/run", f"model.path={model_dir}", *overrides]
        return RecordingTrainer(load_config(None, overrides), total_steps, signal_in)

    return build


LATER = "trainer.val_before_train=false"
EVERY_2 = ("data.val_files=['v.parquet']", "trainer.val_every=2")


@pytest.mark.parametrize(
    ("total_steps", "settings", "stop", "calls"),
    [
        (3, (), None, "validate 0, step 1, step 2, step 3, validate 3, save 3"),
        (
            5,
            (LATER, *EVERY_2, "trainer.save_every=3", "trainer.save_every_s=0"),
            None,
            "step 1, step 2, validate 2, step 3, save 3, step 4, validate 4, step 5, validate 5, save 5",
        ),
        (
            5,
            EVERY_2,  # each validation is saved
            None,
            "validate 0, step 1, step 2, validate 2, save 2, step 3, step 4, validate 4, save 4, "
            "step 5, validate 5, save 5",
        ),
        (3, (LATER, "trainer.save_every_s=1e-9"), None, "step 1, save 1, step 2, save 2, step 3, validate 3, save 3"),
        (1, (LATER,), 7, "step 1, validate 1, save 1"),
        (5, (LATER,), "step 2", "step 1, step 2, save 2"),
        (5, (LATER, "trainer.save_every=2"), "save 2", "step 1, step 2, save 2, step 3, save 3"),
        (5, (), "validate 0", "validate 0"),
    ],
)
def test_a_run_validates_and_saves_as_configured_or_stops_and_saves(make, total_steps, settings, stop, calls):
    """Stop after the step of a number, or with a signal in the call of a name."""
    is_step = isinstance(stop, int)
    trainer = make(total_steps, *settings, signal_in=None if is_step else stop)
    fit(trainer, stop_after=stop if is_step else None)
    assert ", ".join(trainer.calls) == calls


def test_an_early_stop_saves_without_validation_and_goes_on(make, caplog):
    trainer = make(5, LATER)
    fit(trainer, stop_after=2)
    assert trainer.calls == ["step 1", "step 2", "save 2"]
    assert "stopped after step 2 of 5; run the same command to continue, without --stop-after" in caplog.text
    fit(trainer, stop_after=3)
    assert trainer.calls[3:] == ["step 3", "save 3"]


def test_settings_that_a_finished_run_cannot_use_are_an_error(make, tmp_path, caplog, monkeypatch):
    trainer = make(5, "actor.optimizer.lr=0.5", "controller.threads=3", f"data.train_files=['{tmp_path}/a.jsonl']")
    trainer.global_step, config = 5, trainer.run.identity["config"]
    same = {**config, "controller.threads": 1, "trainer.total_steps": 3, "data.train_files": ["a.jsonl"]}
    monkeypatch.setattr(trainer.run, "starts", lambda: [{"directory": str(tmp_path)}])
    trainer.run.checkpoint = SimpleNamespace(info={"config": same})
    fit(trainer)
    assert "is finished: it is at step 5 of 5" in caplog.text
    trainer.run.checkpoint.info["config"] = {**same, "actor.optimizer.lr": 0.1, "lora.targets": ["q_proj"]}
    with pytest.raises(
        CheckpointConfigError, match=r"is at step 5 already.* was \['q_proj'\] and .*optimizer.lr was 0\.1 and is 0\.5"
    ):
        fit(trainer, stop_after=2)
    assert trainer.calls == []


def test_a_run_with_nothing_to_do_writes_nothing(make, tmp_path, caplog):
    trainer = make(5)
    trainer.global_step = 4
    for step in (4, 2, 0):
        fit(trainer, stop_after=step)
    assert caplog.text.count("is already at step 4: nothing to do") == 3
    trainer.global_step = 5
    fit(trainer)
    assert "is finished: it is at step 5 of 5. Raise trainer.total_steps" in caplog.text
    assert trainer.calls == []
    assert not (tmp_path / "run").exists()
