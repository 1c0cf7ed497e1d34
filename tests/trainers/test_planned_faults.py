"""The faults of a run are written before its workers start, and not into the directory of a run that goes on."""

import json

import pytest

from hybridflow.config import load_config
from hybridflow.controller import Role
from hybridflow.errors import ConfigError, RunInUseError
from hybridflow.runtime.fault_points import arm_faults, fault_point_of_step
from hybridflow.trainers import RunDirectory
from hybridflow.trainers.planned_faults import prepare_faults, warn_of_unfired_faults

PLAN = 'faults.plan=["2: delay driver in step", "3: kill actor_rollout/0 in backward"]'


@pytest.fixture
def prepare(tmp_path, model_dir):
    """Yield a function that prepares the faults of a run of 10 steps and returns its directory."""

    def prepare(*overrides):
        paths = [f"trainer.run_dir={tmp_path}/run", f"model.path={model_dir}"]
        config = load_config(None, [*paths, "controller.backend=ray", *overrides])
        run = RunDirectory(config, "train")
        prepare_faults(config, run, [Role.ActorRollout, Role.Reward], total_steps=10)
        return run

    yield prepare
    arm_faults(load_config(None))


def test_planned_and_drawn_faults_are_logged_and_written(prepare, tmp_path, caplog):
    prepare()
    assert not (tmp_path / "run").exists()
    assert caplog.text == ""
    prepare(PLAN, "faults.random=3")
    faults = json.loads((tmp_path / "run" / "faults.json").read_text())
    assert faults[:2] == ["2: delay driver in step", "3: kill actor_rollout/0 in backward"]
    assert len(faults) == 5
    assert f"faults that this run injects into itself: {'; '.join(faults)}" in caplog.text
    prepare(PLAN, "faults.random=3")
    assert json.loads((tmp_path / "run" / "faults.json").read_text()) == faults


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("11: kill driver in step", "expected a step from 1 to 10, got 11"),
        ("1: kill actor/0 in start", "'actor/0' is not a worker of this run"),
    ],
)
def test_faults_that_cannot_fire_in_this_run_are_an_error(prepare, tmp_path, plan, message):
    with pytest.raises(ConfigError, match=message):
        prepare(f'faults.plan=["{plan}"]')
    assert not (tmp_path / "run").exists()


def test_the_faults_of_a_running_run_are_not_overwritten(prepare, tmp_path):
    run = prepare(PLAN)
    run.begin()
    fault_point_of_step(1)
    before = {file: file.read_text() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    with pytest.raises(RunInUseError):
        prepare('faults.plan=["5: kill driver in step"]')
    assert {file: file.read_text() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before
    run.end()


def test_faults_that_did_not_fire_are_logged(prepare, caplog):
    prepare(PLAN, "faults.delay_s=0")
    fault_point_of_step(2)
    warn_of_unfired_faults()
    assert caplog.messages[-1].endswith("from these steps on: 3: kill actor_rollout/0 in backward")
