"""Runs whose log-probs are exact: resumed, with older weights, and on several ranks."""

from contextlib import nullcontext

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
@pytest.mark.parametrize("lag", [1, 2])
def test_samples_of_a_lag_have_the_log_probs_of_the_weights_of_their_version(run, task, lag):
    """Also those of a run that was stopped and resumed. A checkpoint has the batches that wait for their step."""
    more = (f"trainer.lag={lag}", "algorithm.rollout_weights=token", "trainer.save_every=1", "trainer.total_steps=5")
    for stop in (("--stop-after=2",), ()):
        saved = run(*EXACT, *more, "trainer.keep_checkpoints=9", *stop) / "checkpoints"
    model, sampled_after = ModelConfig(dtype="bfloat16"), set()
    engine = TorchEngine(str(task / "model"), "policy", model=model, memory=MemoryConfig(), exact=True)
    initial = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    for path in saved.glob("*/batch_*.safetensors"):
        rows = DataProto.load_from_disk(path)
        (version,) = rows.batch["rollout_versions"][rows.batch["response_mask"]].unique().tolist()
        step = version // 2  # of two optimizer steps
        sampled_after.add(step)
        for other in (step, step + 1):
            at = open_checkpoint(saved / f"step_{other:06d}").load("actor", "model") if other else initial
            engine.load_state_dict({"num_updates": other, "model": at})
            with nullcontext() if other == step else pytest.raises(RolloutError, match="sampled tokens have another"):
                require_exact(rows, engine.forward(rows)["log_probs"])
    assert sampled_after == set(range(5 - lag))


@pytest.mark.runs
@pytest.mark.ray
@pytest.mark.own_run("ray_two: exact log-probs")
def test_sharded_ranks_have_the_log_probs_of_sampling(run):
    ray = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "controller.num_workers=2")
    assert mismatches_of(run(*ray, *EXACT, FROM_TRAINER, "trainer.total_steps=2")) == [0, 0]
