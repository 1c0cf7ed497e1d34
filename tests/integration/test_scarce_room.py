"""A run on a cluster whose room another program takes: it starts with fewer processes, and later uses the room."""

import pytest

from hybridflow.config import load_config
from hybridflow.controller.ray import RayResourcePool
from hybridflow.controller.ray.resource_pool import nodes_of_cluster
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers import build_trainer

pytestmark = [pytest.mark.exhaustive, pytest.mark.ray, pytest.mark.own_run("ray_two: another program has the room")]

SETTINGS = (
    *("controller.backend=ray", "placement.pools={main=[1],rollout=[2]}", "placement.roles.rollout=rollout"),
    *("placement.min_processes={rollout=1}", "trainer.deterministic=false", "trainer.total_steps=8"),
    *("data.val_files=[]", "controller.threads=1"),
)


def test_a_run_starts_with_processes_that_fit_and_uses_room_later(tiny, task, tmp_path, ray_backend):
    ray_backend.check_fit([RayResourcePool([1], cpus_per_process=0.01)])  # connects
    (node,) = nodes_of_cluster()
    share = node.free["CPU"] / 3
    other = RayResourcePool([1], cpus_per_process=share)  # another program: two of three shares are left
    other.places()
    command = [*tiny.GRPO, *SETTINGS, f"controller.cpus_per_worker={share}", f"trainer.run_dir={tmp_path}/run"]
    with build_trainer(load_config(task / "rl.toml", command)) as trainer:
        assert trainer.rollout.world_size == 1
        train_step = trainer.train_step

        def releasing_step():
            if trainer.global_step == 2:
                other.release()
            return train_step()

        vars(trainer)["train_step"] = releasing_step
        trainer.fit()
        assert trainer.rollout.world_size == 2
    sizes = [row["processes/rollout"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert sizes[:3] == [1, 1, 1]
    assert sizes[-1] == 2
    assert [row["action"] for row in read_jsonl(tmp_path / "run" / "recoveries.jsonl")] == ["resize"]
