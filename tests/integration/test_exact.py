"""Runs whose log-probs are exact, on several ranks."""

import pytest

from hybridflow.runtime.observe import read_jsonl


@pytest.mark.runs
@pytest.mark.ray
@pytest.mark.own_run("ray_two: exact log-probs")
def test_sharded_ranks_have_the_log_probs_of_sampling(run):
    ray = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "controller.num_workers=2")
    settings = ("rollout.exact=true", "model.dtype=bfloat16", "actor.mini_batch_size=4", "trainer.total_steps=2")
    directory = run(*ray, *settings, "actor.old_log_probs_from=trainer", name="exact")
    rows = read_jsonl(directory / "metrics.jsonl")
    assert [row["rollout/log_prob_mismatch_max"] for row in rows if "rollout/log_prob_mismatch_max" in row] == [0, 0]
