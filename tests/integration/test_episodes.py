"""Runs of episodes as commands: on Ray as in one process, with a lag, after lost workers, replayed, evaluated."""

import pytest

from fixtures.planted_faults import faults
from fixtures.tiny_episodes import episode_settings
from fixtures.tiny_run import texts_of
from hybridflow.runtime.observe import read_jsonl

ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "recovery.backoff_s=0")
POOLS = (*ON_RAY, "placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate")
LAG = ("trainer.lag=1", "algorithm.rollout_weights=token")


def command(episode_task, run_dir, *settings):
    return ["train", *episode_settings(episode_task, "Talk", f"trainer.run_dir={run_dir}", *settings)]


def weights_of(run_dir):
    return (run_dir / "checkpoints" / "step_000003" / "actor.safetensors").read_bytes()


@pytest.mark.runs
@pytest.mark.ray
@pytest.mark.own_run("episodes: on Ray, with lost workers")
def test_episodes_that_lose_workers_on_ray_equal_those_in_one_process(
    episodes_run, episode_task, tmp_path, run_in_turn
):
    kills = faults("2: kill rollout/0 in generate", "3: kill actor_rollout/0 in backward")
    disturbed = command(episode_task, tmp_path / "run", *POOLS, kills)
    run_in_turn(disturbed, shares_cluster=True)
    assert weights_of(tmp_path / "run") == weights_of(episodes_run)
    assert texts_of(tmp_path / "run") == texts_of(episodes_run)
    recovered = read_jsonl(tmp_path / "run" / "recoveries.jsonl")
    assert sum(len(row["errors"]) for row in recovered) == 2


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("episodes: on Ray")
def test_episodes_in_other_layouts_equal_those_in_one_process(episodes_run, episode_task, tmp_path, run_in_turn):
    kills = faults("2: kill actor_rollout/0 in generate", "3: kill actor_rollout/0 in backward")
    runs = {"ray": (*ON_RAY, kills), "lag_local": LAG, "lag_ray": (*LAG, *POOLS)}
    runs["two"] = (*ON_RAY, "controller.num_workers=2")
    run_in_turn(*(command(episode_task, tmp_path / name, *more) for name, more in runs.items()), shares_cluster=True)
    for name, like in (("ray", episodes_run), ("lag_ray", tmp_path / "lag_local")):
        assert weights_of(tmp_path / name) == weights_of(like), name
        assert texts_of(tmp_path / name) == texts_of(like), name
    assert weights_of(tmp_path / "lag_local") != weights_of(episodes_run)
    assert texts_of(tmp_path / "two")[:4] == texts_of(episodes_run)[:4]  # of the first step


@pytest.mark.runs
@pytest.mark.ray
@pytest.mark.own_run("episodes: on Ray, with updates in flight, streamed")
def test_episodes_go_on_with_new_weights_and_end_in_parts(episode_task, tmp_path, run_in_turn):
    in_flight = (*POOLS, *LAG, "rollout.on_new_weights=retract", "trainer.stream=true", "trainer.total_steps=4")
    run_in_turn(command(episode_task, tmp_path / "run", *in_flight), shares_cluster=True)
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    assert len(rows) == 4
    assert all(row["staleness/max"] <= 1 for row in rows)
    assert all(row["weight_sync/probe_diff_max"] < 1e-4 for row in rows if "weight_sync/probe_diff_max" in row)
    events = [(row["event"], row["number"]) for row in read_jsonl(tmp_path / "run" / "schedule.jsonl")]
    assert [number for event, number in events if event == "begin"] == [0, 1, 2, 3]
    assert all(row["episode/ended_error"] == 0 for row in rows)


KILLS = faults("2: kill rollout/0 in generate", "3: kill actor_rollout/0 in backward")


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("episodes: on Ray, streamed, with lost workers")
@pytest.mark.parametrize("lag", [(), LAG], ids=["without a lag", "with a lag"])
def test_streamed_episodes_that_lose_workers_equal_undisturbed_ones(episode_task, tmp_path, run_in_turn, lag):
    settings = {"calm": (*POOLS, *lag, "trainer.stream=true"), "run": (*POOLS, *lag, "trainer.stream=true", KILLS)}
    run_in_turn(*(command(episode_task, tmp_path / name, *of) for name, of in settings.items()), shares_cluster=True)
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "calm")
    assert texts_of(tmp_path / "run") == texts_of(tmp_path / "calm")
    assert sum(len(row["errors"]) for row in read_jsonl(tmp_path / "run" / "recoveries.jsonl")) == 2


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("episodes: on Ray, with updates in flight and lost workers")
def test_episodes_in_flight_go_on_after_lost_workers(episode_task, tmp_path, run_in_turn):
    in_flight = (*POOLS, *LAG, "rollout.on_new_weights=retract", "trainer.save_every=1", KILLS)
    run_in_turn(command(episode_task, tmp_path / "run", *in_flight), shares_cluster=True)
    steps = [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    assert steps == [1, 2, 3]
    assert sum(len(row["errors"]) for row in read_jsonl(tmp_path / "run" / "recoveries.jsonl")) >= 2


@pytest.mark.runs
def test_a_step_of_episodes_is_learned_again_without_its_environment(episodes_run, tmp_path, hybridflow, monkeypatch):
    events = tmp_path / "events"
    monkeypatch.setenv("EVENTS", str(events))
    shown = hybridflow("replay", episodes_run, "--step", "3")
    assert (shown.status, "bit for bit" in shown.out) == (0, True), shown.err
    assert not events.exists()


@pytest.mark.runs
def test_an_environment_is_evaluated_alone(episode_task, tmp_path, hybridflow):
    settings = [each for each in episode_settings(episode_task) if not each.startswith("data.train_files")]
    more = [f"data.val_files=['{episode_task}/test.parquet']", "validation.group_size=2", "validation.temperature=1"]
    output = ("reward.processes=0", "--output", tmp_path / "samples.jsonl")
    outcome = hybridflow("evaluate", *settings, *more, *output)
    assert outcome.status == 0, outcome.err
    assert "val/talk/score/mean" in outcome.out
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert len(samples) == 6
    assert {message["role"] for sample in samples for message in sample["messages"]} == {"assistant", "user"}
