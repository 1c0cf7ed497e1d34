"""Runs of a mixture of experts that replay the routes of the sampler."""

import shutil

import pytest

from fixtures.families import write_family
from fixtures.tiny_run import metrics_differ
from hybridflow.runtime.observe import read_jsonl

NAMES = ("loss", "policy_loss", "entropy", "grad_norm", "clipfrac", "routes_changed")


@pytest.fixture
def mixture(task, tmp_path):
    """Return the settings of a run with a mixture of experts that has the tokenizer of the task."""
    directory = shutil.copytree(task / "model", tmp_path / "mixture")
    (directory / "model.safetensors").unlink()
    sizes = {"vocab_size": 88, "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0}
    write_family(directory, "qwen3_moe", num_experts=6, **sizes)
    return (f"model.path={directory}", "trainer.total_steps=2", "actor.mini_batch_size=4")


@pytest.mark.runs
@pytest.mark.ray
@pytest.mark.own_run("ray_two: a mixture of experts")
def test_two_ranks_that_recompute_replay_the_routes_of_one_process(mixture, run):
    one = run(*mixture, name="one")
    ray = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "controller.num_workers=2")
    two = run(*mixture, *ray, "model.gradient_checkpointing=true", name="two")
    names = [f"actor/{name}" for name in NAMES]
    assert metrics_differ(one, two, *names, rel=1e-3, absolute=1e-6) == []
    rows = read_jsonl(one / "metrics.jsonl")
    assert all(row["rollout/log_prob_mismatch_max"] < 1e-4 for row in rows)
    assert 0 < rows[0]["actor/routes_changed"] < 0.3  # of the second mini-batch, after an update
