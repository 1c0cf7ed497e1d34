"""When a run saves, on a clock that the test moves, and that saves change no number."""

import pytest

from fixtures import tiny_run
from hybridflow.config import TrainerConfig, load_config
from hybridflow.trainers import build_trainer
from hybridflow.trainers.run.training_loop import SaveTimes


class Clock:
    seconds = 100.0

    def __call__(self):
        return self.seconds


def test_a_save_is_due_when_the_seconds_passed_since_the_last_one():
    clock, found = Clock(), []
    schedule = SaveTimes(TrainerConfig(save_every_s=60), clock)
    for clock.seconds in (159.0, 160.0, 170.0, 229.0, 230.0):
        found.append(schedule.is_due(1, has_validated=False))
        if clock.seconds == 170.0:
            schedule.restart()
    assert found == [False, True, True, False, True]
    assert SaveTimes(TrainerConfig(), Clock()).is_due(1, has_validated=True)
    assert not SaveTimes(TrainerConfig(), Clock()).is_due(1, has_validated=False)


def test_zero_seconds_leave_only_saves_by_steps():
    clock = Clock()
    schedule = SaveTimes(TrainerConfig(save_every=3, save_every_s=0), clock)
    clock.seconds = 1e9
    assert [step for step in range(1, 8) if schedule.is_due(step, has_validated=True)] == [3, 6]


@pytest.mark.runs
@pytest.mark.own_run("grpo: it saves at its end only")
@pytest.mark.usefixtures("restores_the_process")
def test_a_run_that_saves_each_step_equals_one_that_saves_at_the_end(task, grpo_run, tmp_path):
    changes = ["model.dtype=float64", f"trainer.run_dir={tmp_path}/run", "trainer.save_every_s=0"]
    with build_trainer(load_config(task / "rl.toml", [*changes, *tiny_run.GRPO])) as trainer:
        trainer.fit()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000006"]
    found, expected = tiny_run.results_of(tmp_path / "run", 6), tiny_run.results_of(grpo_run, 6)
    # without the state of Python's random numbers, from which the shape checks of tests draw
    for name in ("actor.safetensors", "actor.json", "metrics", "samples"):
        assert found[name] == expected[name]
