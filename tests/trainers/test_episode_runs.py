"""Runs with environments: equal to runs without where they do the same, on every backend, and after an interruption."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from fixtures.chat_tokenizers import chat_tokenizer
from fixtures.tiny_episodes import episode_settings, write_episode_task
from fixtures.tiny_run import texts_of
from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import load_config
from hybridflow.environments import CalledTool, ChatRenderer, Episode, EpisodeRow, PlayedEpisode, ToolCall, Turn
from hybridflow.errors import ConfigError, EnvironmentConfigError, RewardError
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers import build_trainer
from hybridflow.trainers.build.build_generation import build_generator
from hybridflow.trainers.run.text_generation import typed_prompts
from hybridflow.workers.episode_batch import episode_batch

HERE = ("reward.processes=0",)
"""Environments in the rank itself, which starts sooner."""
ONE_STEP, TWO_STEPS = "trainer.total_steps=1", "trainer.total_steps=2"


def own_run(why):
    return lambda test: pytest.mark.runs(pytest.mark.own_run(f"episodes: {why}")(test))


def train(task, run_dir, environment="Talk", *settings, stop_after=None):
    """Train and return the bytes of the actor's weights and the metrics of each step."""
    settings = (f"trainer.run_dir={run_dir}", "trainer.save_every=1", "trainer.keep_checkpoints=9", *settings)
    with build_trainer(load_config(None, episode_settings(task, environment, *settings))) as trainer:
        trainer.fit(stop_after=stop_after) if stop_after else trainer.fit()
    return results(run_dir)


def results(run_dir):
    store = CheckpointStore(Path(run_dir) / "checkpoints")
    weights = (store.path(max(store.list())) / "actor.safetensors").read_bytes()
    return weights, [row for row in read_jsonl(Path(run_dir) / "metrics.jsonl") if row["step"]]


@own_run("its environment answers once, or there is none")
@pytest.mark.parametrize(
    ("environment", "changes"),
    [("Once", ()), ("Once", ("algorithm.advantage=remax",)), ("Bare", ())],
    ids=["grpo", "remax", "function"],
)
def test_episodes_of_one_turn_equal_a_run_without_environments(episode_task, tmp_path, environment, changes):
    settings, function = (*HERE, TWO_STEPS, *changes), f"reward.function={episode_task}/environments.py:once"
    given = [function] if environment == "Bare" else []  # it scores the episodes
    episodes, metrics = train(episode_task, tmp_path / "episodes", environment, *settings, *given)
    plain = [function, "environment.classes={}", *settings]
    responses, without = train(episode_task, tmp_path / "plain", "Once", *plain)
    assert episodes == responses
    for name in ("critic/score/mean", "actor/loss", "actor/grad_norm", "response_length/mean", "prompt_length/mean"):
        assert [row[name] for row in metrics] == [row[name] for row in without]
    assert len({row["critic/score/mean"] for row in metrics}) > 1


@own_run("with a critic, and rows that no episode uses")
def test_rows_that_no_episode_uses_change_nothing(episode_task, tmp_path):
    gae = (*HERE, "algorithm.advantage=gae", TWO_STEPS)
    _, one = train(episode_task, tmp_path / "one", "Talk", *gae)
    _, three = train(episode_task, tmp_path / "three", "Talk", *gae, "environment.max_rows=3")
    for row, other in zip(one, three, strict=True):
        for name in ("critic/score/mean", "critic/advantages/max", "critic/returns/mean", "response_length/mean"):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)
        assert row["actor/loss"] == pytest.approx(other["actor/loss"], rel=1e-3, abs=1e-6)
        assert row["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)


@own_run("streamed, and the same on whole batches")
def test_a_streamed_run_of_episodes_learns_as_one_on_whole_batches(episode_task, tmp_path):
    exact = (*HERE, "model.dtype=float64", "environment.max_rows=2", TWO_STEPS, "algorithm.advantage=remax")
    exact += ("algorithm.rollout_weights=sequence",)
    _, whole = train(episode_task, tmp_path / "whole", "Talk", *exact)
    _, streamed = train(episode_task, tmp_path / "streamed", "Talk", *exact, "trainer.stream=true")
    for name in ("critic/score/mean", "episode/turns/mean", "actor/loss", "actor/grad_norm", "response_length/mean"):
        assert [row[name] for row in streamed] == pytest.approx([row[name] for row in whole], rel=1e-9), name
    assert texts_of(tmp_path / "streamed") == texts_of(tmp_path / "whole") != []


@own_run("stopped after each step")
def test_an_interrupted_run_of_episodes_equals_an_uninterrupted_one(episode_task, episodes_run, tmp_path, monkeypatch):
    events = tmp_path / "events"
    monkeypatch.setenv("EVENTS", str(events))
    train(episode_task, tmp_path / "parts", "Talk", *HERE, stop_after=1)
    asked = len(events.read_text().split())
    resumed, _ = train(episode_task, tmp_path / "parts", "Talk", *HERE)
    assert resumed == results(episodes_run)[0]
    assert len(events.read_text().split()) > asked


@own_run("it goes on from step 1 of its copy")
def test_a_repeated_step_does_not_ask_environments_again(episode_task, episodes_run, tmp_path, monkeypatch):
    shutil.copytree(episodes_run, tmp_path / "run")
    for step in (2, 3):  # as if the run had been killed after its first checkpoint
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:06d}")
    events = tmp_path / "events"
    monkeypatch.setenv("EVENTS", str(events))
    resumed, _ = train(episode_task, tmp_path / "run", "Talk", *HERE)
    assert resumed == results(episodes_run)[0]
    assert not events.exists()


@pytest.mark.runs
def test_samples_show_the_turns(episode_task, episodes_run):
    several = next(sample for sample in read_jsonl(episodes_run / "samples.jsonl") if sample["turns"] > 1)
    assert [message["role"] for message in several["messages"]][:3] == ["assistant", "user", "assistant"]
    assert several["messages"][1]["content"].startswith("turn 0, ")
    assert several["finish_reason"] in ("done", "tokens")
    assert several["turn_rewards"][:2] == [0.0, 0.25 if several["turns"] == 2 else pytest.approx(0.1)]
    assert '"name": "count"' in several["rendered_prompt"]  # the prompt of the episode, with its tools


CHANGING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ 'earlier: ' if m.role == 'assistant' and not loop.last }}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes earlier turns in another way, as others drop their reasoning."""


@own_run("its chat template changes earlier turns")
def test_a_template_that_changes_earlier_turns_makes_a_row_of_each(tmp_path):
    write_episode_task(tmp_path, template=CHANGING)
    code = (tmp_path / "environments.py").read_text()
    (tmp_path / "environments.py").write_text(code.replace("def count(", "def _count("))
    with pytest.raises(ConfigError, match=r"'seq-mean-token-sum': it would count the rows of an episode as sequ"):
        train(tmp_path, tmp_path / "refused", "Talk", *HERE, "actor.loss_aggregation=seq-mean-token-sum")
    _, metrics = train(tmp_path, tmp_path / "run", "Talk", *HERE, "actor.epochs=2", "algorithm.filter_groups=true")
    assert "max_rows = 4" in (tmp_path / "run" / "config.toml").read_text()
    assert max(row["episode/turns/max"] for row in metrics) == 3
    assert all(row["episode/ended_rows"] == row["episode/ended_error"] == 0 for row in metrics)
    # Each turn is in a row with the context in which it was sampled: otherwise its log-probs would be others.
    assert max(row["rollout/log_prob_mismatch_max"] for row in metrics) < 1e-3
    numbers = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    for row, of_step in zip(metrics, numbers, strict=True):
        assert len(of_step["score"]) == 12
        assert row["critic/score/mean"] == pytest.approx(sum(of_step["score"]) / 12)
        assert row["response_length/mean"] == pytest.approx(sum(of_step["length"]) / 12)


@own_run("its turns end with a stop string")
def test_turns_that_end_with_a_stop_string_go_on(episode_task, tmp_path):
    stops = ("rollout.stop_strings=['\ufffd']", "environment.max_rows=4", "actor.epochs=2", TWO_STEPS)
    _, metrics = train(episode_task, tmp_path / "run", "Talk", *HERE, *stops)
    assert max(row["episode/turns/max"] for row in metrics) == 3
    assert all(row["episode/ended_done"] > 0.5 for row in metrics)
    assert max(row["rollout/log_prob_mismatch_max"] for row in metrics) < 1e-3
    first = [(each["messages"][0]["content"], each["turns"]) for each in read_jsonl(tmp_path / "run/samples.jsonl")]
    assert any(said.endswith("\ufffd") and turns > 1 for said, turns in first)  # bytes of no character
    assert not any("\ufffd" in said[:-1] for said, _ in first)


@pytest.mark.vllm
def test_vllm_samples_the_turns_of_episodes(tmp_path):
    write_episode_task(tmp_path, width=64)  # heads of 32 dimensions, which vLLM computes on a CPU
    vllm = ("rollout.backend=vllm", "rollout.enforce_eager=true", "trainer.total_steps=2")
    _, metrics = train(tmp_path, tmp_path / "run", "Talk", *HERE, *vllm, "actor.epochs=2")
    assert max(row["episode/turns/max"] for row in metrics) == 3
    assert all(row["episode/ended_error"] == 0 for row in metrics)
    assert max(row["rollout/log_prob_mismatch"] for row in metrics) < 1e-3


OTHERS = "environment.classes={walk='TASK/environments.py:Talk', once='TASK/environments.py:Once'}"


@own_run("its environments fail")
@pytest.mark.parametrize(
    ("environment", "settings", "error", "message"),
    [
        (
            "Breaks",
            (),
            RewardError,
            r"environment 'talk' step raised KeyError: 'map' at .*environments.py:\d+, in step: ",
        ),
        ("RankedByOne", (), RewardError, r"environment 'talk' group_rewards returned \[1\.0\]; expected 3 numbers"),
        ("Talk", ("data.max_prompt_length=100",), RewardError, r"first prompt has \d+ tokens, with the schemas of to"),
        ("Breaks", ("rollout.group_size=1",), ConfigError, r"rollout\.group_size"),
        ("Talk", (OTHERS,), ConfigError, r"no environment serves data_source 'talk' in .*; environment\.classes has"),
    ],
)
def test_a_failing_environment_stops_the_run_with_its_error(
    episode_task, tmp_path, environment, settings, error, message
):
    settings = [setting.replace("TASK", str(episode_task)) for setting in settings]
    with pytest.raises(error, match=message):
        train(episode_task, tmp_path / "run", environment, *HERE, *settings)


@own_run("its environments fail")
def test_rewards_of_turns_before_a_failure_are_not_learned_from(episode_task, tmp_path):
    zero = ("reward.on_error=zero", "reward.max_failure_rate=1.0", "algorithm.advantage=gae", ONE_STEP)
    _, (metrics,) = train(episode_task, tmp_path / "run", "Breaks", *HERE, *zero)
    assert 0.5 < metrics["episode/ended_error"] <= 1
    assert metrics["reward/error_rate"] == metrics["episode/ended_error"]
    assert metrics["reward/timeout_rate"] == 0
    assert metrics["critic/returns/min"] == 0.0


@own_run("its chat template does not end")
def test_a_chat_template_that_does_not_end_is_an_error(episode_task, tmp_path, monkeypatch):
    original, done = ChatRenderer.render, threading.Event()

    def render(self, messages, ending):
        while threading.current_thread() is not threading.main_thread() and not done.is_set():
            time.sleep(0.01)
        return original(self, messages, ending)

    monkeypatch.setattr("hybridflow.workers.episodes.LOOP_LIMIT_S", 0.5)
    monkeypatch.setattr(ChatRenderer, "render", render)
    try:
        with pytest.raises(EnvironmentConfigError, match=r"the chat template of model\.path does not end"):
            train(episode_task, tmp_path / "run", "Talk", "reward.processes=1")
    finally:
        done.set()


@own_run("rewards compare the episodes of a group")
def test_rewards_of_a_group_compare_its_episodes(episode_task, tmp_path):
    _, (metrics,) = train(episode_task, tmp_path / "run", "Ranked", *HERE, ONE_STEP)
    assert metrics["critic/score/max"] == 1.0
    assert 1 / 3 <= metrics["critic/score/mean"] < 1.0


@own_run("its rewards are weighted")
def test_rewards_of_turns_count_beside_weighted_ones(episode_task, episodes_run, tmp_path):
    _, (weighted,) = train(episode_task, tmp_path / "run", "Talk", *HERE, "reward.weights={words=2.0}", ONE_STEP)
    plain = results(episodes_run)[1][0]
    scores, words = (read_jsonl(path / "rollouts.jsonl")[0] for path in (episodes_run, tmp_path / "run"))
    bonus = weighted["critic/score/mean"] - 2 * plain["reward/words/mean"]
    turns = [sum(number / 10 for number in range(count - 1)) + 0.25 for count in scores["turns"]]
    assert set(scores["finish_reason"]) == {"done"}
    assert bonus == pytest.approx(sum(turns) / 12, abs=1e-5)
    assert scores["turns"] == words["turns"]


@own_run("with two environments")
@pytest.mark.parametrize(("weights", "sources"), [("talk=0, once=1", {"once"}), ("", {"once", "talk"})])
def test_several_environments_are_mixed_by_their_weights(episode_task, tmp_path, weights, sources):
    classes = OTHERS.replace("walk", "talk").replace("TASK", str(episode_task))
    rows = [
        {"prompt": f"question {i}", "data_source": "talk" if i < 12 else "once", "extra_info": {"index": i}}
        for i in range(16)
    ]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = [classes, f"data.train_files=['{tmp_path}/mixed.jsonl']", f"environment.weights={{{weights}}}", *HERE]
    train(episode_task, tmp_path / "run", "Talk", *mixed)
    numbers = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    found = [(source, turns) for row in numbers for source, turns in zip(row["data_source"], row["turns"], strict=True)]
    assert {source for source, _ in found} == sources
    assert {turns for source, turns in found if source == "once"} == {1}


def test_a_run_with_environments_generates_plain_responses(episode_task):
    with build_generator(load_config(None, episode_settings(episode_task, "Talk", *HERE))) as generator:
        (row,) = generator.run(typed_prompts(["question 1"]))
    assert isinstance(row["responses"][0], str)


def test_a_call_that_cannot_be_read_counts_as_a_wrong_call():
    turn = Turn(0, "", called=(CalledTool(ToolCall("f"), "1"),), malformed=("a call is not JSON",))
    played = PlayedEpisode(Episode({}, turns=[turn], ended="done"), [EpisodeRow([1])])
    columns = episode_batch([played], [0], 1, chat_tokenizer("qwen2_5")).batch
    assert (columns["num_tool_calls"].tolist(), columns["num_tool_errors"].tolist()) == ([2], [1])
