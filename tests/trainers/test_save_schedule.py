"""When a run saves, on a clock that the test moves, and that saves change no number."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridflow.config import TrainerConfig, load_config
from hybridflow.trainers import build_trainer
from hybridflow.trainers.save_schedule import SaveSchedule


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def test_a_save_is_due_when_the_seconds_passed_since_the_last_one():
    clock = Clock()
    schedule = SaveSchedule(TrainerConfig(save_every_s=60), clock)
    clock.seconds = 159.0
    assert not schedule.is_due(1, has_validated=False)
    clock.seconds = 160.0
    assert schedule.is_due(2, has_validated=False)
    clock.seconds = 170.0
    schedule.restart()
    clock.seconds = 229.0
    assert not schedule.is_due(3, has_validated=False)
    clock.seconds = 230.0
    assert schedule.is_due(4, has_validated=False)


def test_a_validation_makes_a_save_due():
    schedule = SaveSchedule(TrainerConfig(), Clock())
    assert schedule.is_due(1, has_validated=True)
    assert not schedule.is_due(1, has_validated=False)


def test_zero_seconds_leave_only_saves_by_steps():
    clock = Clock()
    schedule = SaveSchedule(TrainerConfig(save_every=3, save_every_s=0), clock)
    clock.seconds = 1e9
    assert [step for step in range(1, 8) if schedule.is_due(step, has_validated=True)] == [3, 6]


@pytest.fixture
def tiny():
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "fixtures" / "tiny_run.py")))


@pytest.fixture
def restores_the_process():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("restores_the_process")
@pytest.mark.parametrize("in_background", ["false", "true"])
def test_a_run_that_saves_each_step_equals_one_that_saves_at_the_end(tiny, tmp_path, in_background):
    task = tiny.write_task(tmp_path)
    changes = [*tiny.GRPO, "trainer.total_steps=3", f"trainer.save_in_background={in_background}"]
    results, saved = [], []
    for seconds in ("1e-9", "0"):
        run_dir = tmp_path / f"run_{seconds}"
        overrides = [*changes, f"trainer.run_dir={run_dir}", f"trainer.save_every_s={seconds}"]
        with build_trainer(load_config(task / "rl.toml", overrides)) as trainer:
            trainer.fit()
        saved.append(sorted(path.name for path in (run_dir / "checkpoints").iterdir()))
        results.append(tiny.results_of(run_dir, 3))
    assert saved == [["step_000002", "step_000003"], ["step_000003"]]
    # without the state of Python's random numbers, from which the shape checks of tests draw
    for name in ("actor.safetensors", "actor.json", "metrics", "samples"):
        assert results[0][name] == results[1][name]
