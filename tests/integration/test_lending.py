"""A run with `placement.lend`: training ranks generate prompts that wait for memory in the rollout engine."""

import pytest

from fixtures.tiny_run import differing, spans
from hybridflow.observability import read_jsonl


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("ray: it lends")
def test_a_run_that_lends_has_the_samples_and_weights_of_one_that_does_not(task, tmp_path, run_in_turn):
    command = ["train", task / "rl.toml", "controller.backend=ray", "controller.cpus_per_worker=0.5"]
    command += ["placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate", "data.val_files=[]"]
    command += ["model.dtype=float64", "trainer.total_steps=4"]
    # memory of keys and values for one group, of 3 responses of up to 60 tokens
    command += [
        "data.max_response_length=60",
        "memory.max_tokens_per_micro_batch=4096",
        "rollout.kv_cache_bytes=400000",
    ]
    alone, lent = tmp_path / "alone", tmp_path / "lent"
    run_in_turn(
        [*command, f"trainer.run_dir={alone}"],
        [*command, "placement.lend=true", f"trainer.run_dir={lent}"],
        shares_cluster=True,
    )
    assert max(row["sampling/lent_groups"] for row in read_jsonl(lent / "metrics.jsonl")) > 0
    assert differing(alone, lent, 4, names=frozenset({"samples", "actor.safetensors"})) == set()
    calls = [row for row in read_jsonl(lent / "trace/calls.jsonl") if row["kind"] == "call"]
    generated = [row for row in calls if "LendingActorWorker.generate" in row["where"]]
    assert 0 < len(generated) <= len(spans(lent, "generate_sequences"))
