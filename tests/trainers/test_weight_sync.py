"""The controller's part of a weight sync between two pools, both in this process."""

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from hybridflow.errors import WeightSyncError
from hybridflow.protocol import DataProto
from hybridflow.trainers.weight_sync import BetweenPools
from hybridflow.weight_sync import Disk
from hybridflow.workers import ActorWorker, RolloutWorker

PROMPTS = {"prompts": [[5, 6, 7]], "prompt_mask": [[True] * 3], "group_ids": [0]}


@pytest.fixture
def pools(tiny_model, tmp_path):
    threads = torch.get_num_threads()

    def build(transport):
        overrides = [f"model.path={tiny_model()}", "controller.threads=1", "rollout.sync_bucket_bytes=2000"]
        overrides += ["data.max_response_length=6", "memory.max_tokens_per_micro_batch=1024"]
        overrides += [f"rollout.weight_sync={transport}", f"trainer.run_dir={tmp_path}"]
        config = load_config(None, overrides)
        learn = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(ActorWorker, config=config))
        meshes = {"rollout": {"data": 2, "tensor": 1}}
        generate = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(RolloutWorker, config=config), meshes=meshes)
        return learn, generate

    yield build
    torch.set_num_threads(threads)


@pytest.mark.parametrize("transport", ["object_store", "disk", "ipc"])
def test_a_version_is_sent_once_and_log_probs_agree(pools, transport, tmp_path):
    learn, generate = pools(transport)
    sync = BetweenPools(learn, generate)
    metrics = sync()
    assert metrics["weight_sync/bytes"] > 2 * 2000
    assert metrics["weight_sync/probe_diff_max"] < 1e-5
    assert sync() == {}
    assert not (tmp_path / "weight_sync").exists()
    prompts = DataProto.from_dict({name: torch.tensor(rows) for name, rows in PROMPTS.items()})
    prompts.meta_info["noise_key"] = [0, 0, 0]
    rollouts = generate.generate_greedy_sequences(prompts)
    computed = learn.compute_log_probs(rollouts).batch["old_log_probs"]
    torch.testing.assert_close(computed, rollouts.batch["rollout_log_probs"], atol=1e-5, rtol=0)


def test_a_failed_sync_is_repeated(pools, monkeypatch):
    sync, receive = BetweenPools(*pools("disk")), Disk.receive

    def failing(self, sent):
        raise WeightSyncError("the disk is gone")

    monkeypatch.setattr(Disk, "receive", failing)
    with pytest.raises(WeightSyncError, match="the disk is gone"):
        sync()
    monkeypatch.setattr(Disk, "receive", receive)
    assert sync()["weight_sync/bytes"] > 0
