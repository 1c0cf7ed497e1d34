"""Runs that inject faults into themselves: every fault point fires, and the same command goes on to the same bits."""

import json
import signal

import pytest

from hybridflow.config import load_config
from hybridflow.config.faults import PHASES, phases_of

ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5")
TWO_POOLS = (
    *ON_RAY,
    *("placement.pools={learn=[2],generate=[2]}", "placement.roles.rollout=generate"),
    *("algorithm.advantage=gae", "trainer.save_in_background=true"),
)


def plan(*faults):
    return f"faults.plan={json.dumps(faults)}"


def fired(run):
    return [json.loads(line)["fault"] for line in (run / "faults" / "fired.jsonl").read_text().splitlines()]


def require_same_results(tiny, one, other, step):
    one, other = tiny.results_of(one, step), tiny.results_of(other, step)
    assert one.keys() == other.keys()
    # Ray draws from Python's random number generator in the driver; our code does not.
    assert {name for name in one if one[name] != other[name]} <= {"controller.safetensors", "sha256 of files"}


@pytest.mark.slow
def test_faults_of_the_driver_end_a_local_run_that_goes_on_to_the_same_bits(tiny, task, tmp_path, start):
    command = ["train", f"{task}/rl.toml", *tiny.GRPO, "data.val_files=[]", "trainer.save_every=1"]
    command += ["trainer.total_steps=4", plan("2: disk driver in publish", "3: kill driver in log")]
    outcomes = []
    for _ in range(3):
        process = start(*command, f"trainer.run_dir={tmp_path}/faulty")
        outcomes.append((process.communicate()[1], process.returncode))
    (full, _), (killed, _), (finished, _) = outcomes
    assert [status for _, status in outcomes] == [75, -signal.SIGKILL, 0], outcomes
    assert "No space left on device (injected by the fault '2: disk driver in publish')" in full
    assert "this run injects into itself: 3: kill driver in log" in killed
    assert "continuing" in finished
    assert "did not fire" not in finished
    assert fired(tmp_path / "faulty") == ["2: disk driver in publish", "3: kill driver in log"]
    whole = start(*command, "faults.plan=[]", f"trainer.run_dir={tmp_path}/whole")
    assert "faults" not in whole.communicate()[1]
    assert not list((tmp_path / "whole").glob("faults*"))
    require_same_results(tiny, tmp_path / "faulty", tmp_path / "whole", 4)


def test_a_finished_run_names_the_faults_that_did_not_fire(run, task, tmp_path, hybridflow):
    changes = ["data.val_files=[]", "trainer.total_steps=2", f"trainer.run_dir={tmp_path}/run", "faults.delay_s=0"]
    late = plan("1: delay driver in publish", "2: delay driver in publish")
    outcome = hybridflow("train", task / "rl.toml", *changes, late)
    assert outcome.status == 0
    assert "faults that did not fire" in outcome.log
    assert fired(tmp_path / "run") == ["1: delay driver in publish"]
    assert json.loads((tmp_path / "run" / "faults.json").read_text()) == [
        "1: delay driver in publish",
        "2: delay driver in publish",
    ]
    evaluated = hybridflow("evaluate", "--run", tmp_path / "run", f"data.val_files=['{task}/test.parquet']")
    assert (evaluated.status, "fault" in evaluated.log) == (0, False)


@pytest.mark.slow
@pytest.mark.ray
def test_every_fault_point_of_a_run_on_ray_fires_and_changes_no_bit(tiny, task, tmp_path, run_in_turn):
    command = ["train", f"{task}/rl.toml", *TWO_POOLS, "data.val_files=[]", "trainer.total_steps=3"]
    config = load_config(f"{task}/rl.toml", TWO_POOLS)
    roles = ("actor_rollout", "rollout", "critic", "reward")
    faults = [f"2: delay {role}/1 in {phase}" for role in roles for phase in phases_of(config, role)]
    faults += [f"2: delay driver in {phase}" for phase in phases_of(config, "driver")]
    faults = [fault.replace("2:", "1:") if fault.endswith("start") else fault for fault in faults]
    assert {fault.split()[-1] for fault in faults} == set(PHASES)
    run_in_turn(
        [*command, f"trainer.run_dir={tmp_path}/faulty", plan(*faults), "faults.delay_s=0"],
        [*command, f"trainer.run_dir={tmp_path}/whole"],
        shares_cluster=True,
    )
    assert sorted(fired(tmp_path / "faulty")) == sorted(faults)
    require_same_results(tiny, tmp_path / "faulty", tmp_path / "whole", 3)


@pytest.mark.slow
@pytest.mark.ray
def test_a_rank_killed_in_backward_ends_the_run_which_goes_on_to_the_same_bits(
    tiny, task, tmp_path, start, run_in_turn
):
    command = ["train", f"{task}/rl.toml", *tiny.GRPO, *ON_RAY, "controller.num_workers=2", "data.val_files=[]"]
    command += ["trainer.save_every=1", "trainer.total_steps=3", "recovery.max_restarts=0"]
    faulty = [*command, f"trainer.run_dir={tmp_path}/faulty", plan("2: kill actor_rollout/0 in backward")]
    process = start(*faulty)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    assert "actor_rollout" in errors
    assert errors.endswith("\nThe same command continues from the last checkpoint, that of step 1.\n")
    run_in_turn(faulty, [*command, f"trainer.run_dir={tmp_path}/whole"], shares_cluster=True)
    assert fired(tmp_path / "faulty") == ["2: kill actor_rollout/0 in backward"]
    require_same_results(tiny, tmp_path / "faulty", tmp_path / "whole", 3)
