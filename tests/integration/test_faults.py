"""Runs that inject faults into themselves: every fault point fires, and the same command goes on to the same bits."""

import json
import signal

import pytest

from fixtures.tiny_run import FROM_RAY, GRPO, differing
from hybridflow.config import load_config
from hybridflow.config.faults import PHASES, phases_of

TWO_POOLS = (
    *("controller.backend=ray", "controller.cpus_per_worker=0.5"),
    *("placement.pools={learn=[2],generate=[2]}", "placement.roles.rollout=generate"),
    *("algorithm.advantage=gae", "trainer.save_in_background=true"),
)


def plan(*faults):
    return f"faults.plan={json.dumps(faults)}"


def fired(run):
    return [json.loads(line)["fault"] for line in (run / "faults" / "fired.jsonl").read_text().splitlines()]


@pytest.mark.runs
@pytest.mark.own_run("grpo: its driver is killed")
def test_faults_of_the_driver_end_a_local_run_that_goes_on_to_the_same_bits(task, grpo_run, tmp_path, start):
    faults = ("2: disk driver in publish", "3: kill driver in log")
    command = ["train", f"{task}/rl.toml", *GRPO, "model.dtype=float64", "trainer.save_every=1", plan(*faults)]
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
    assert fired(tmp_path / "faulty") == list(faults)
    assert not list(grpo_run.glob("faults*"))
    assert differing(tmp_path / "faulty", grpo_run, 6) == set()


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("ray_two: with every fault point")
def test_every_fault_point_of_a_run_on_ray_fires_and_changes_no_bit(task, tmp_path, run_in_turn):
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
    assert differing(tmp_path / "faulty", tmp_path / "whole", 3) <= FROM_RAY
