"""Runs of episodes as commands: on Ray as in one process, with a lag, after lost workers, replayed, evaluated."""

import json
import re

import pytest

from fixtures.tiny_episodes import episode_settings, write_episode_task
from hybridflow.observability import read_jsonl

ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "recovery.backoff_s=0")
POOLS = (*ON_RAY, "placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate")
LAG = ("trainer.lag=1", "algorithm.rollout_weights=token")


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("episode_task")
    write_episode_task(directory)
    return directory


def command(episodes, run_dir, *settings):
    return ["train", *episode_settings(episodes, "Talk", f"trainer.run_dir={run_dir}", *settings)]


def weights_of(run_dir):
    return (run_dir / "checkpoints" / "step_000003" / "actor.safetensors").read_bytes()


@pytest.mark.ray
@pytest.mark.slow
def test_episodes_on_ray_equal_those_in_one_process(tiny, episodes, tmp_path, run_in_turn):
    runs = {"local": (), "ray": ON_RAY, "pools": POOLS, "lag_local": LAG, "lag_ray": (*LAG, *POOLS)}
    runs["two"] = (*ON_RAY, "controller.num_workers=2")
    run_in_turn(*(command(episodes, tmp_path / name, *more) for name, more in runs.items()), shares_cluster=True)
    for name, like in (("ray", "local"), ("pools", "local"), ("lag_ray", "lag_local")):
        assert weights_of(tmp_path / name) == weights_of(tmp_path / like), name
        assert tiny.texts_of(tmp_path / name) == tiny.texts_of(tmp_path / like), name
    assert weights_of(tmp_path / "lag_local") != weights_of(tmp_path / "local")
    first, two = (tiny.texts_of(tmp_path / name)[:4] for name in ("local", "two"))  # of the first step
    assert first == two


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("pools", [ON_RAY, POOLS])
def test_a_run_of_episodes_that_loses_workers_equals_an_undisturbed_one(episodes, tmp_path, run_in_turn, pools):
    generating = "rollout" if pools is POOLS else "actor_rollout"
    faults = [f"2: kill {generating}/0 in generate", "3: kill actor_rollout/0 in backward"]
    run_in_turn(
        command(episodes, tmp_path / "whole", *pools),
        command(episodes, tmp_path / "disturbed", *pools, f"faults.plan={json.dumps(faults)}"),
        shares_cluster=True,
    )
    assert weights_of(tmp_path / "disturbed") == weights_of(tmp_path / "whole")
    recovered = read_jsonl(tmp_path / "disturbed" / "recoveries.jsonl")
    assert sum(len(row["errors"]) for row in recovered) == 2


@pytest.mark.slow
def test_a_step_of_episodes_is_learned_again_with_the_same_bits(episodes, tmp_path, run_in_turn):
    events = tmp_path / "events"
    settings = ("trainer.save_every=1", "trainer.keep_checkpoints=9")
    run_in_turn(command(episodes, tmp_path / "run", *settings))
    run_in_turn(["replay", tmp_path / "run", "--step", "3"], EVENTS=str(events))
    assert not events.exists()


def test_an_environment_is_evaluated_alone(episodes, tmp_path, hybridflow):
    settings = [each for each in episode_settings(episodes) if not each.startswith("data.train_files")]
    more = [f"data.val_files=['{episodes}/test.parquet']", "validation.group_size=2", "validation.temperature=1"]
    outcome = hybridflow("evaluate", *settings, *more, "--output", tmp_path / "samples.jsonl")
    assert outcome.status == 0, outcome.err
    assert re.search(r"val/talk/score/mean", outcome.out)
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert len(samples) == 6
    assert {message["role"] for sample in samples for message in sample["messages"]} == {"assistant", "user"}
