"""Runs with `rollout.schedule = "expected"`: the samples of the even split, and resume with the same schedule."""

import pytest

from hybridflow.observability import read_jsonl

EXPECTED = "rollout.schedule=expected"
ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5")
TWO_ENGINES = {
    "shared": (*ON_RAY, "controller.num_workers=2"),
    "separate": (*ON_RAY, "placement.pools={learn=[1],generate=[2]}", "placement.roles.rollout=generate"),
}
TWO_ENGINES["streamed"] = (*TWO_ENGINES["separate"], "trainer.stream=true")
NAMES = ("actor.safetensors", "actor.json", "metrics", "samples")  # random states differ, see `uninterrupted`


@pytest.mark.parametrize("lag", [(), ("trainer.lag=2", "algorithm.rollout_weights=token")])
def test_a_resumed_run_expects_the_lengths_of_the_uninterrupted_one(tiny, run, tmp_path, lag):
    run("whole", EXPECTED, *lag)
    for stop in (["--stop-after", "4"], []):
        run("resumed", EXPECTED, *lag, *stop)
    whole, resumed = (tiny.results_of(tmp_path / name, 6) for name in ("whole", "resumed"))
    assert all(whole[name] == resumed[name] for name in NAMES)
    errors = [row.get("schedule/length_error") for row in read_jsonl(tmp_path / "resumed" / "metrics.jsonl")[1:]]
    first = 1 + 2 * bool(lag)  # the batch that begins when a first one has been read
    assert [error is None for error in errors] == [True] * first + [False] * (6 - first)


@pytest.mark.ray
@pytest.mark.slow
def test_two_engines_give_the_samples_of_one(tiny, task, tmp_path, run_in_turn):
    exact = ["train", task / "rl.toml", "model.dtype=float64", "data.val_files=[]", "trainer.total_steps=4"]
    commands = [[*exact, f"trainer.run_dir={tmp_path}/one"]]
    for name, where in TWO_ENGINES.items():
        commands.append([*exact, EXPECTED, *where, f"trainer.run_dir={tmp_path}/{name}"])
    resumed = [*exact, EXPECTED, *TWO_ENGINES["separate"], f"trainer.run_dir={tmp_path}/resumed"]
    run_in_turn(*commands, [*resumed, "--stop-after", "2"], resumed, shares_cluster=True)
    results = {name: tiny.results_of(tmp_path / name, 4) for name in ("one", *TWO_ENGINES, "resumed")}
    assert all(own["samples"] == results["one"]["samples"] for own in results.values())
    assert results["resumed"]["actor.safetensors"] == results["separate"]["actor.safetensors"]
    assert results["resumed"]["metrics"] == results["separate"]["metrics"]
    for name in TWO_ENGINES:
        rows = read_jsonl(tmp_path / name / "metrics.jsonl")
        assert ["schedule/imbalance" in row for row in rows] == [False, True, True, True]
