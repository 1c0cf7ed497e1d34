"""Runs with injected faults: every fault point fires, and the same command goes on to the same bits."""

import signal

import pytest
from support.faults import PHASES, fired_faults, phases_of, plan_faults

from fixtures.planted_faults import faults
from fixtures.tiny_run import FROM_RAY, GRPO, differing
from hybridflow.config import load_config

TWO_POOLS = (
    *("controller.backend=ray", "controller.cpus_per_worker=0.5"),
    *("placement.pools={learn=[2],generate=[2]}", "placement.roles.rollout=generate"),
    *("algorithm.advantage=gae", "trainer.save_in_background=true"),
)


def fired(run):
    return [row["fault"] for row in fired_faults(run)]


@pytest.mark.runs
@pytest.mark.own_run("grpo: its driver is killed")
def test_faults_of_the_driver_end_a_local_run_that_goes_on_to_the_same_bits(task, grpo_run, tmp_path, start):
    entries = ["2: disk driver in publish", "3: kill driver in log"]
    run = tmp_path / "faulty"
    command = ["train", f"{task}/rl.toml", *GRPO, "model.dtype=float64", "trainer.save_every=1"]
    outcomes = []
    for count in range(3):
        assert fired(run) == entries[:count]
        process = start(*command, f"trainer.run_dir={run}", HYBRIDFLOW_FAULTS=plan_faults(run, entries))
        outcomes.append((process.communicate()[1], process.returncode))
    (full, _), _, (finished, _) = outcomes
    assert [status for _, status in outcomes] == [75, -signal.SIGKILL, 0], outcomes
    assert "No space left on device (injected by the fault '2: disk driver in publish')" in full
    assert "continuing" in finished
    assert fired(run) == entries
    assert differing(run, grpo_run, 6) == set()


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("ray_two: with every fault point")
def test_every_fault_point_of_a_run_on_ray_fires_and_changes_no_bit(task, tmp_path, run_in_turn):
    command = ["train", f"{task}/rl.toml", *TWO_POOLS, "data.val_files=[]", "trainer.total_steps=3"]
    config = load_config(f"{task}/rl.toml", TWO_POOLS)
    roles = ("actor_rollout", "rollout", "critic", "reward")
    entries = [f"2: delay {role}/1 in {phase}" for role in roles for phase in phases_of(config, role)]
    entries += [f"2: delay driver in {phase}" for phase in phases_of(config, "driver")]
    entries = [entry.replace("2:", "1:") if entry.endswith("start") else entry for entry in entries]
    assert {entry.split()[-1] for entry in entries} == set(PHASES)
    run_in_turn(
        [*command, f"trainer.run_dir={tmp_path}/faulty", faults(*entries)],
        [*command, f"trainer.run_dir={tmp_path}/whole"],
        shares_cluster=True,
    )
    assert sorted(fired(tmp_path / "faulty")) == sorted(entries)
    assert differing(tmp_path / "faulty", tmp_path / "whole", 3) <= FROM_RAY
