"""Runs of agents as commands: on Ray as in one process, with a lag, after lost workers, replayed."""

import signal

import pytest

from fixtures.planted_faults import faults
from fixtures.tiny_episodes import episode_settings
from fixtures.tiny_run import texts_of
from hybridflow.runtime.observe import read_jsonl

ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "recovery.backoff_s=0")
POOLS = (*ON_RAY, "placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate")
LAG = ("trainer.lag=1", "algorithm.rollout_weights=token")
KILLS = faults("2: kill rollout/0 in generate", "3: kill actor_rollout/0 in backward")


def command(episode_task, run_dir, *settings):
    agent = f'environment.classes={{talk = "{episode_task}/agents.py:talk"}}'
    more = (agent, "reward.processes=0", "trainer.save_every=1", "trainer.keep_checkpoints=9")
    return ["train", *episode_settings(episode_task, "Talk", *more, f"trainer.run_dir={run_dir}", *settings)]


def weights_of(run_dir, step=3):
    return (run_dir / "checkpoints" / f"step_{step:06d}" / "actor.safetensors").read_bytes()


def require_equal(run, other):
    assert texts_of(run) == texts_of(other) != []
    assert weights_of(run) == weights_of(other)


@pytest.mark.runs
@pytest.mark.ray
@pytest.mark.own_run("episodes: agents, on Ray, with lost workers")
def test_agents_that_lose_workers_on_ray_equal_those_in_one_process(
    episode_task, tmp_path, run_in_turn, hybridflow, monkeypatch
):
    calm = command(episode_task, tmp_path / "calm", "trainer.log_tokens=20")
    run_in_turn(calm, command(episode_task, tmp_path / "run", *POOLS, KILLS), shares_cluster=True)
    require_equal(tmp_path / "run", tmp_path / "calm")
    recovered = read_jsonl(tmp_path / "run" / "recoveries.jsonl")
    assert sum(len(row["errors"]) for row in recovered) == 2
    monkeypatch.setenv("EVENTS", str(tmp_path / "events"))
    shown = hybridflow("replay", tmp_path / "calm", "--step", "3")
    assert (shown.status, "bit for bit" in shown.out) == (0, True), shown.err
    assert not (tmp_path / "events").exists()


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("episodes: agents, on Ray, in other layouts")
def test_agents_in_other_layouts_equal_those_in_one_process(episode_task, tmp_path, run_in_turn):
    kills = faults("2: kill actor_rollout/0 in generate", "3: kill actor_rollout/0 in backward")
    runs = {"calm": (), "ray": (*ON_RAY, "reward.processes=1", kills), "lag_local": LAG, "lag_ray": (*LAG, *POOLS)}
    runs |= {"two": (*ON_RAY, "controller.num_workers=2"), "lag_kills": (*LAG, *POOLS, KILLS)}
    run_in_turn(*(command(episode_task, tmp_path / name, *more) for name, more in runs.items()), shares_cluster=True)
    for name, like in (("ray", "calm"), ("lag_ray", "lag_local"), ("lag_kills", "lag_local")):
        require_equal(tmp_path / name, tmp_path / like)
    assert texts_of(tmp_path / "two")[:4] == texts_of(tmp_path / "calm")[:4]  # of the first step


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("episodes: agents, on Ray, with updates in flight, streamed")
@pytest.mark.parametrize("kills", [(), (KILLS,)], ids=["calm", "with lost workers"])
def test_agents_go_on_with_new_weights_and_end_in_parts(episode_task, tmp_path, run_in_turn, kills):
    in_flight = (*POOLS, *LAG, "rollout.on_new_weights=retract", "trainer.stream=true", "trainer.total_steps=4")
    run_in_turn(command(episode_task, tmp_path / "run", *in_flight, *kills), shares_cluster=True)
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["staleness/max"] <= 1 and row["episode/ended_error"] == 0 for row in rows)


ENDS = """
plain = talk


async def talk(session, row):
    result = await plain(session, row)
    with open(os.environ["COUNT"], "a") as file:
        file.write("x")
    if os.path.getsize(os.environ["COUNT"]) == 18:
        os.kill(os.getpid(), 9)
    return result
"""


@pytest.mark.exhaustive
@pytest.mark.own_run("episodes: agents, whose driver is killed")
def test_agents_whose_driver_is_killed_in_a_step_equal_undisturbed_ones(episode_task, tmp_path, run_in_turn, start):
    (tmp_path / "ends.py").write_text((episode_task / "agents.py").read_text() + ENDS)
    ends, count = f'environment.classes={{talk = "{tmp_path}/ends.py:talk"}}', tmp_path / "count"
    for status in (-signal.SIGKILL, 0):
        process = start(*command(episode_task, tmp_path / "run", ends), COUNT=str(count))
        _, error = process.communicate()
        assert process.returncode == status, error
    run_in_turn(command(episode_task, tmp_path / "calm"))
    require_equal(tmp_path / "run", tmp_path / "calm")
    assert 36 <= count.stat().st_size < 36 + 12  # those that had ended were not run again
