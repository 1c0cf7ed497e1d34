"""Runs of agents that know nothing of episodes: trained as environments are, and repeated without being asked again."""

import shutil
from pathlib import Path

import pytest

from fixtures.tiny_episodes import episode_settings, write_episode_task
from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import load_config
from hybridflow.errors import RewardError
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers import build_trainer

HERE = "reward.processes=0"


def own_run(why):
    return lambda test: pytest.mark.runs(pytest.mark.own_run(f"episodes: {why}")(test))


def train(task, run_dir, agent, *settings):
    """Train and return the bytes of the actor's weights and the metrics of each step."""
    source = agent if ":" in agent else f"{task}/agents.py:{agent}"
    named = f'environment.classes={{talk = "{source}"}}'
    more = (f"trainer.run_dir={run_dir}", "trainer.save_every=1", "trainer.keep_checkpoints=9", named, *settings)
    with build_trainer(load_config(None, episode_settings(task, "Talk", "trainer.total_steps=2", *more))) as trainer:
        trainer.fit()
    store = CheckpointStore(Path(run_dir) / "checkpoints")
    weights = (store.path(max(store.list())) / "actor.safetensors").read_bytes()
    return weights, [row for row in read_jsonl(Path(run_dir) / "metrics.jsonl") if row["step"]]


def samples_of(run_dir):
    return read_jsonl(run_dir / "samples.jsonl")


@own_run("an agent beside an environment that does the same")
def test_an_agent_gets_the_greedy_turns_of_an_environment_that_does_the_same(episode_task, tmp_path):
    toolless = tmp_path / "toolless.py"
    toolless.write_text((episode_task / "environments.py").read_text().replace("def count", "def _count"))
    greedy = (HERE, "rollout.top_k=1", "environment.max_rows=1")
    _, agent = train(episode_task, tmp_path / "agent", "talk", *greedy)
    _, environment = train(episode_task, tmp_path / "environment", f"{toolless}:Talk", *greedy)
    for name in ("critic/score/mean", "response_length/mean", "episode/turns/mean", "reward/words/mean"):
        assert [row[name] for row in agent] == pytest.approx([row[name] for row in environment]), name
    both = zip(samples_of(tmp_path / "agent"), samples_of(tmp_path / "environment"), strict=True)
    for one, other in both:
        assert one["tokens"]["ids"] == other["tokens"]["ids"] != []
        assert [each["content"] for each in one["messages"]] == [each["content"] for each in other["messages"]]


@own_run("an agent, interrupted")
def test_a_repeated_step_acts_agents_out_without_running_them(episode_task, tmp_path, monkeypatch):
    events = tmp_path / "events"
    monkeypatch.setenv("EVENTS", str(events))
    whole, metrics = train(episode_task, tmp_path / "run", "talk", HERE)
    asked = len(events.read_text().split())
    assert asked == sum(row["episode/turns/mean"] for row in metrics) * 12
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")  # as if it had been killed after step 1
    repeated, _ = train(episode_task, tmp_path / "run", "talk", HERE)
    assert repeated == whole
    assert len(events.read_text().split()) == asked
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
    shutil.rmtree(tmp_path / "run" / "environments")
    again, _ = train(episode_task, tmp_path / "run", "talk", HERE)
    assert again == whole
    assert len(events.read_text().split()) > asked


@own_run("an agent with branches, in processes")
def test_branches_are_rows_whose_tokens_have_the_log_probs_of_the_trained_model(episode_task, tmp_path):
    exact = ("reward.processes=1", "model.dtype=float64", "environment.max_turns=6", "trainer.deterministic=false")
    _, metrics = train(episode_task, tmp_path / "run", "branches", *exact)
    for row in metrics:
        assert row["rollout/log_prob_mismatch_max"] < 1e-12
        assert row["episode/turns/mean"] == 5
        assert row["episode/ended_done"] == 1
    _, last = train(episode_task, tmp_path / "last", "branches", *exact, "agent.train_branches=last")
    assert [row["episode/turns/mean"] for row in last] != []
    assert last[0]["response_length/mean"] < metrics[0]["response_length/mean"]


@pytest.mark.vllm
def test_vllm_samples_the_branches_of_an_agent(tmp_path):
    write_episode_task(tmp_path, width=64)  # heads of 32 dimensions, which vLLM computes on a CPU
    vllm = ("rollout.backend=vllm", "rollout.enforce_eager=true", "environment.max_turns=6")
    _, metrics = train(tmp_path, tmp_path / "run", "branches", HERE, *vllm)
    assert {row["episode/turns/mean"] for row in metrics} == {5}
    assert max(row["rollout/log_prob_mismatch"] for row in metrics) < 1e-3


@own_run("an agent that reaches a limit")
def test_an_agent_that_a_limit_ends_has_the_reward_of_the_function(episode_task, tmp_path):
    limited = (HERE, "environment.max_turns=2", "trainer.total_steps=1")
    function = f"reward.function={episode_task}/environments.py:once"
    _, (row,) = train(episode_task, tmp_path / "run", "endless", *limited, function)
    assert (row["episode/ended_turns"], row["reward/error_rate"], row["episode/turns/mean"]) == (1, 0, 2)
    with pytest.raises(RewardError, match=r"environment\.max_turns=2 turns"):
        train(episode_task, tmp_path / "none", "endless", *limited)


@own_run("an agent with branches, of which some are trained")
def test_advantages_are_those_of_episodes_whatever_branches_are_trained(episode_task, tmp_path):
    runs = {}
    for which in ("all", "last"):
        more = (HERE, f"agent.train_branches={which}", "trainer.total_steps=1")
        _, (metrics,) = train(episode_task, tmp_path / which, "detours", *more)
        samples = [(row["score"], row["tokens"]["advantages"]) for row in samples_of(tmp_path / which)]
        runs[which] = samples, {name: metrics[name] for name in metrics if "score" in name or "episode/" in name}
    assert runs["all"] == runs["last"]
    assert len({score for score, _ in runs["all"][0]}) > 1


@own_run("agents that fail")
def test_failures_of_agents_are_counted_and_never_a_reward_of_zero(episode_task, tmp_path):
    lenient = ("reward.processes=1", "reward.on_error=zero", "reward.max_failure_rate=1.0", "reward.error_score=-1.0")
    _, metrics = train(episode_task, tmp_path / "run", "breaks", *lenient)
    for row in metrics:
        assert 0 < row["reward/error_rate"] < 1
        assert row["reward/error_rate"] == row["episode/ended_error"]
        assert row["critic/score/mean"] == pytest.approx(1 - 2 * row["reward/error_rate"])
        assert row["reward/zero_rate"] == 0
    with pytest.raises(RewardError, match=r"the agent (raised KeyError|returned score=nan)"):
        train(episode_task, tmp_path / "stopped", "breaks", HERE)
    for agent, message in (
        ("silent", "the agent ended without a turn of the model; it must use its address"),
        ("refused", "the agent ended without a turn of the model; its last request was refused: the conversation has"),
        ("too_long", "the agent raised BadRequestError: .* leaves no room for a turn"),
    ):
        with pytest.raises(RewardError, match=message):
            train(episode_task, tmp_path / agent, agent, HERE)
