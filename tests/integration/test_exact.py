"""Runs whose log-probs are exact: resumed, with older weights, and on several ranks."""

import pytest

from fixtures.tiny_run import WEIGHTS, differing
from hybridflow.checkpoint import open_checkpoint
from hybridflow.config import MemoryConfig, ModelConfig
from hybridflow.engines import TorchEngine
from hybridflow.errors import RolloutError
from hybridflow.protocol import DataProto
from hybridflow.runtime.observe import read_jsonl
from hybridflow.workers.exact_samples import require_exact

EXACT = ("rollout.exact=true", "model.dtype=bfloat16", "actor.mini_batch_size=4")
FROM_TRAINER = "actor.old_log_probs_from=trainer"


def mismatches_of(directory):
    rows = read_jsonl(directory / "metrics.jsonl")
    return [row["rollout/log_prob_mismatch_max"] for row in rows if "rollout/log_prob_mismatch_max" in row]


@pytest.mark.runs
@pytest.mark.own_run("resumed: exact log-probs")
def test_a_resumed_exact_run_equals_an_uninterrupted_one_without_mismatch(run):
    more = (*EXACT, FROM_TRAINER, "trainer.total_steps=3", "trainer.log_samples=24")
    whole = run(*more, name="whole")
    for stop in (("--stop-after=1",), ()):
        resumed = run(*more, *stop)
    assert differing(resumed, whole, 3, names=WEIGHTS | {"tokens of samples"}) == set()
    assert mismatches_of(resumed) == mismatches_of(whole) == [0, 0, 0]


@pytest.mark.runs
@pytest.mark.own_run("lag: exact log-probs")
def test_samples_of_a_lag_have_the_log_probs_of_the_weights_of_their_version(run, task):
    """The checkpoint of step n has the batch of step n + 1, sampled with the weights of step n - 1."""
    lag = ("trainer.lag=1", "algorithm.rollout_weights=token", "trainer.save_every=1", "trainer.keep_checkpoints=9")
    saved = run(*EXACT, *lag, "trainer.total_steps=4") / "checkpoints"
    model = ModelConfig(dtype="bfloat16")
    engine = TorchEngine(str(task / "model"), "policy", model=model, memory=MemoryConfig(), exact=True)
    for step in (1, 2, 3):
        rows = DataProto.load_from_disk(saved / f"step_{step:06d}" / f"batch_{step:06d}.safetensors")
        require_exact(rows, engine.forward(rows)["log_probs"])
        assert rows.batch["response_mask"].sum() > 24
        weights = open_checkpoint(saved / f"step_{step:06d}").load("actor", "model")
        engine.load_state_dict({"num_updates": step, "model": weights})
        with pytest.raises(RolloutError, match="sampled tokens have another log-prob in training"):
            require_exact(rows, engine.forward(rows)["log_probs"])


@pytest.mark.runs
@pytest.mark.ray
@pytest.mark.own_run("ray_two: exact log-probs")
def test_sharded_ranks_have_the_log_probs_of_sampling(run):
    ray = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "controller.num_workers=2")
    assert mismatches_of(run(*ray, *EXACT, FROM_TRAINER, "trainer.total_steps=2")) == [0, 0]
