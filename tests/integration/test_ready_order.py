"""A run with `rollout.order = "ready"`: a batch has the groups that finish next."""

from collections import Counter

import pytest

from fixtures.tiny_run import differing
from hybridflow.observability import read_jsonl

READY = (
    *("trainer.lag=2", "rollout.on_new_weights=retract", "rollout.order=ready", "trainer.deterministic=false"),
    *("algorithm.rollout_weights=token", "trainer.log_samples=100", "data.max_response_length=40"),
    *("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate"),
)


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("lag: in the order of ready groups")
def test_prompts_are_used_once_per_epoch_and_a_replay_gives_the_same_bits(task, tmp_path, run_in_turn):
    command = ["train", task / "rl.toml", *READY]
    recorded = [*command, "controller.backend=ray", "controller.cpus_per_worker=0.5", f"trainer.run_dir={tmp_path}/run"]
    replayed = [*command, f"trainer.run_dir={tmp_path}/replay", f"rollout.replay={tmp_path}/run"]
    run_in_turn([*recorded, "--stop-after", "4"], recorded, replayed, shares_cluster=True)  # resumed once
    times_used = Counter(sample["rendered_prompt"] for sample in read_jsonl(tmp_path / "run" / "samples.jsonl"))
    assert list(times_used.values()) == [2 * 3] * 24  # three responses in two epochs
    names = frozenset({"samples", "actor.safetensors"})
    assert differing(tmp_path / "replay", tmp_path / "run", 6, names=names) == set()
