"""Runs with `rollout.schedule = "expected"`: resume with the same schedule, and the samples of one engine."""

import pytest

from fixtures.tiny_run import WEIGHTS, differing
from hybridflow.observability import read_jsonl

ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5")
TWO_ENGINES = (*ON_RAY, "placement.pools={learn=[1],generate=[2]}", "placement.roles.rollout=generate")


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("resumed: with expected lengths")
def test_a_resumed_run_on_two_engines_expects_the_same_lengths(task, tmp_path, run_in_turn):
    exact = ["train", task / "rl.toml", "model.dtype=float64", "data.val_files=[]", "trainer.total_steps=4"]
    expected = [*exact, "rollout.schedule=expected", *TWO_ENGINES]
    resumed = [*expected, f"trainer.run_dir={tmp_path}/resumed"]
    whole = [*expected, f"trainer.run_dir={tmp_path}/whole"]
    one = [*exact, f"trainer.run_dir={tmp_path}/one"]
    run_in_turn(one, whole, [*resumed, "--stop-after", "2"], resumed, shares_cluster=True)
    assert differing(tmp_path / "whole", tmp_path / "one", 4, names=frozenset({"samples"})) == set()
    assert differing(tmp_path / "resumed", tmp_path / "whole", 4, names=WEIGHTS) == set()
    rows = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert ["schedule/imbalance" in row for row in rows] == [False, True, True, True]
