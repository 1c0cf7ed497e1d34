"""Runs with environments: equal to runs without where they do the same, on every backend, and after an interruption."""

import json
import threading
import time
from pathlib import Path

import pytest

from fixtures.chat_tokenizers import chat_tokenizer
from fixtures.tiny_episodes import episode_settings, write_episode_task
from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import load_config
from hybridflow.environments import CalledTool, ChatRenderer, Episode, EpisodeRow, PlayedEpisode, ToolCall, Turn
from hybridflow.errors import ConfigError, EnvironmentConfigError, RewardError
from hybridflow.observability import read_jsonl
from hybridflow.trainers import build_trainer, build_validator
from hybridflow.trainers.build_generation import build_generator
from hybridflow.trainers.generation import typed_prompts
from hybridflow.workers.episode_batch import episode_batch


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("episodes")
    write_episode_task(directory)
    return directory


def train(task, run_dir, environment="Talk", *settings, stop_after=None):
    """Train and return the bytes of the actor's weights and the metrics of each step."""
    settings = (f"trainer.run_dir={run_dir}", "trainer.save_every=1", "trainer.keep_checkpoints=9", *settings)
    config = load_config(None, episode_settings(task, environment, *settings))
    with build_trainer(config) as trainer:
        trainer.fit(stop_after=stop_after) if stop_after else trainer.fit()
    return weights(run_dir), [row for row in read_jsonl(Path(run_dir) / "metrics.jsonl") if row["step"]]


def weights(run_dir):
    store = CheckpointStore(Path(run_dir) / "checkpoints")
    return (store.path(max(store.list())) / "actor.safetensors").read_bytes()


HERE = ("reward.processes=0",)
"""Environments in the rank itself, which starts sooner."""


def test_episodes_of_one_turn_equal_a_run_without_environments(task, tmp_path):
    episodes, metrics = train(task, tmp_path / "episodes", "Once", *HERE)
    plain = [f"reward.function={task}/environments.py:once", "environment.classes={}", *HERE]
    responses, without = train(task, tmp_path / "plain", "Once", *plain)
    assert episodes == responses
    for name in ("critic/score/mean", "actor/loss", "actor/grad_norm", "response_length/mean", "prompt_length/mean"):
        assert [row[name] for row in metrics] == [row[name] for row in without]
    assert len({row["critic/score/mean"] for row in metrics}) > 1


def test_environments_in_processes_equal_those_in_the_rank(task, tmp_path):
    here, metrics = train(task, tmp_path / "here", "Talk", *HERE)
    apart, others = train(task, tmp_path / "apart", "Talk", "reward.processes=2")
    assert here == apart
    assert [row["critic/score/mean"] for row in metrics] == [row["critic/score/mean"] for row in others]


def test_rows_that_no_episode_uses_change_nothing(task, tmp_path):
    _, one = train(task, tmp_path / "one", "Talk", *HERE, "algorithm.advantage=gae")
    _, three = train(task, tmp_path / "three", "Talk", *HERE, "algorithm.advantage=gae", "environment.max_rows=3")
    for row, other in zip(one, three, strict=True):
        for name in ("critic/score/mean", "critic/advantages/max", "critic/returns/mean", "response_length/mean"):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)
        assert row["actor/loss"] == pytest.approx(other["actor/loss"], rel=1e-3, abs=1e-6)
        assert row["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)


def test_an_interrupted_run_of_episodes_equals_an_uninterrupted_one(task, tmp_path, monkeypatch):
    whole, _ = train(task, tmp_path / "whole", "Talk", *HERE)
    events = tmp_path / "events"
    monkeypatch.setenv("EVENTS", str(events))
    train(task, tmp_path / "parts", "Talk", *HERE, stop_after=1)
    asked = len(events.read_text().split())
    resumed, _ = train(task, tmp_path / "parts", "Talk", *HERE)
    assert resumed == whole
    assert len(events.read_text().split()) > asked


def test_a_repeated_step_does_not_ask_environments_again(task, tmp_path, monkeypatch):
    whole, _ = train(task, tmp_path / "run", "Talk", *HERE)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (2, 3):  # as if the run had been killed after its first checkpoint
        directory = store.path(step)
        for path in sorted(directory.rglob("*"), reverse=True):
            path.unlink()
        directory.rmdir()
    events = tmp_path / "events"
    monkeypatch.setenv("EVENTS", str(events))
    resumed, _ = train(task, tmp_path / "run", "Talk", *HERE)
    assert resumed == whole
    assert not events.exists()


def test_a_run_with_batches_begun_goes_on_as_an_uninterrupted_one(task, tmp_path):
    lag = ("trainer.lag=1", "algorithm.rollout_weights=token")
    whole, _ = train(task, tmp_path / "whole", "Talk", *HERE, *lag)
    train(task, tmp_path / "parts", "Talk", *HERE, *lag, stop_after=1)
    resumed, _ = train(task, tmp_path / "parts", "Talk", *HERE, *lag)
    assert resumed == whole


def test_samples_and_validation_show_the_turns(task, tmp_path):
    train(task, tmp_path / "run", "Talk", *HERE, f"data.val_files=['{task}/test.parquet']")
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    several = next(sample for sample in samples if sample["turns"] > 1)
    roles = [message["role"] for message in several["messages"]]
    assert roles[:3] == ["assistant", "user", "assistant"]
    assert several["messages"][1]["content"].startswith("turn 0, ")
    assert several["finish_reason"] in ("done", "tokens")
    assert several["turn_rewards"][:2] == [0.0, 0.25 if several["turns"] == 2 else pytest.approx(0.1)]
    assert '"name": "count"' in several["rendered_prompt"]  # the prompt of the episode, with its tools
    config = load_config(None, episode_settings(task, "Talk", *HERE, f"data.val_files=['{task}/test.parquet']"))
    with build_validator(config) as validator:
        metrics, rows = validator.run()
    assert len(rows) == 3
    assert 0 <= metrics["val/score/mean"] <= 2
    assert all(row["messages"][0]["role"] == "assistant" for row in rows)
    assert all(len(row["turn_rewards"]) == row["turns"] >= 1 for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"done", "tokens"}


CHANGING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ 'earlier: ' if m.role == 'assistant' and not loop.last }}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes earlier turns in another way, as others drop their reasoning."""


@pytest.fixture(scope="module")
def changing(tmp_path_factory):
    directory = tmp_path_factory.mktemp("changing")
    write_episode_task(directory, template=CHANGING)
    code = (directory / "environments.py").read_text()
    (directory / "environments.py").write_text(code.replace("def count(", "def _count("))
    return directory


@pytest.mark.parametrize("settings", [(), ("algorithm.filter_groups=true",), ("algorithm.advantage=gae",)])
def test_a_template_that_changes_earlier_turns_makes_a_row_of_each(changing, tmp_path, settings):
    _, metrics = train(changing, tmp_path / "run", "Talk", *HERE, "actor.epochs=2", *settings)
    assert "max_rows = 4" in (tmp_path / "run" / "config.toml").read_text()
    assert max(row["episode/turns/max"] for row in metrics) == 3
    assert all(row["episode/ended_rows"] == row["episode/ended_error"] == 0 for row in metrics)
    # Each turn is in a row with the context in which it was sampled: otherwise its log-probs would be others.
    assert max(row["rollout/log_prob_mismatch_max"] for row in metrics) < 1e-3
    numbers = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    assert {len(row["score"]) for row in numbers} == {12}
    for row, of_step in zip(metrics, numbers, strict=True):
        assert row["critic/score/mean"] == pytest.approx(sum(of_step["score"]) / 12)
        assert row["response_length/mean"] == pytest.approx(sum(of_step["length"]) / 12)


def test_keys_that_count_sequences_are_errors_once_the_template_is_known(changing, tmp_path):
    with pytest.raises(ConfigError, match=r"'seq-mean-token-sum' would count the rows of an episode as sequences"):
        train(changing, tmp_path / "run", "Talk", *HERE, "actor.loss_aggregation=seq-mean-token-sum")


@pytest.mark.vllm
def test_vllm_samples_the_turns_of_episodes(tmp_path):
    write_episode_task(tmp_path, width=64)  # heads of 32 dimensions, which vLLM computes on a CPU
    vllm = ("rollout.backend=vllm", "rollout.enforce_eager=true", "trainer.total_steps=2")
    _, metrics = train(tmp_path, tmp_path / "run", "Talk", *HERE, *vllm, "actor.epochs=2")
    assert max(row["episode/turns/max"] for row in metrics) == 3
    assert all(row["episode/ended_error"] == 0 for row in metrics)
    assert max(row["rollout/log_prob_mismatch"] for row in metrics) < 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.stop_strings=['a']"], r"rollout\.stop_strings=\('a',\) is not supported with environment\.classes"),
        (["trainer.stream=true"], r"trainer\.stream=True is not supported with environment\.classes; use False"),
        (["reward.function=a.py:b"], r"reward\.function='a\.py:b' and environment\.classes both give the rewards"),
        (["environment.weights={walk = 1}"], r"environment\.weights\.walk weighs no environment"),
        (["environment.weights={talk = 0}"], r"environment\.weights are all 0"),
        (["environment.classes={talk = 'talk.py'}"], r"environment\.classes\.talk='talk\.py' names no class"),
        (["environment.max_rows=2", "actor.loss_aggregation=seq-mean-token-sum"], r"count the rows of an episode"),
        (["environment.max_rows=2", "algorithm.rollout_weights=sequence"], r"weigh each row of an episode by itself"),
        (["environment.max_rows=2", "algorithm.rollout_reject={sequence_ratio=[0.5,2.0]}"], r"judge each row of an"),
        (["data.chat_template=false"], r"data\.chat_template=False is not supported"),
    ],
)
def test_settings_that_contradict_environments_are_errors(task, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, episode_settings(task, "Talk", *settings))


def test_a_failing_environment_stops_the_run_with_its_error(tmp_path):
    write_episode_task(
        tmp_path,
        classes="""
class Breaks(Talk):
    async def step(self, turn):
        if turn.number == 1:
            raise KeyError('map')
        return await super().step(turn)
""",
    )
    with pytest.raises(RewardError, match=r"environment 'talk' step raised KeyError: 'map'"):
        train(tmp_path, tmp_path / "stopped", "Breaks", *HERE)
    _, metrics = train(
        tmp_path, tmp_path / "zero", "Breaks", *HERE, "reward.on_error=zero", "reward.max_failure_rate=1.0"
    )
    assert 0 < metrics[0]["reward/error_rate"] < 1
    assert metrics[0]["reward/timeout_rate"] == 0


def test_rewards_of_turns_before_a_failure_are_not_learned_from(tmp_path):
    write_episode_task(
        tmp_path,
        classes="""
class Breaks(Talk):
    async def step(self, turn):
        if turn.number == 1:
            raise KeyError('map')
        return Reply([{'role': 'user', 'content': 'on'}], reward=1.0)
""",
    )
    zero = ("reward.on_error=zero", "reward.max_failure_rate=1.0", "algorithm.advantage=gae", "trainer.total_steps=1")
    _, metrics = train(tmp_path, tmp_path / "run", "Breaks", *HERE, *zero)
    assert metrics[0]["episode/ended_error"] > 0.5
    assert metrics[0]["critic/returns/min"] == 0.0


def test_a_chat_template_that_does_not_end_is_an_error(task, tmp_path, monkeypatch):
    original, done = ChatRenderer.render, threading.Event()

    def render(self, messages, *, add_generation_prompt):
        while threading.current_thread() is not threading.main_thread() and not done.is_set():
            time.sleep(0.01)
        return original(self, messages, add_generation_prompt=add_generation_prompt)

    monkeypatch.setattr("hybridflow.workers.episodes.LOOP_LIMIT_S", 1.5)
    monkeypatch.setattr(ChatRenderer, "render", render)
    try:
        with pytest.raises(EnvironmentConfigError, match=r"the chat template of model\.path does not end"):
            train(task, tmp_path / "run", "Talk", "reward.processes=1")
    finally:
        done.set()


def test_rewards_of_a_group_compare_its_episodes(tmp_path):
    write_episode_task(
        tmp_path,
        classes="""
class Ranked(Environment):
    async def group_rewards(self, episodes):
        sizes = [len(e.turns[0].content) for e in episodes]
        return [float(size == max(sizes)) for size in sizes]
""",
    )
    _, metrics = train(tmp_path, tmp_path / "run", "Ranked", *HERE)
    assert metrics[0]["critic/score/max"] == 1.0
    assert 1 / 3 <= metrics[0]["critic/score/mean"] < 1.0


def test_a_failure_of_group_rewards_stops_the_run_with_its_text(tmp_path):
    write_episode_task(
        tmp_path,
        classes="""
class Ranked(Environment):
    async def group_rewards(self, episodes):
        return [1.0]
""",
    )
    with pytest.raises(RewardError, match=r"environment 'talk' group_rewards returned \[1\.0\]; expected 3 numbers"):
        train(tmp_path, tmp_path / "run", "Ranked", *HERE)


def test_rewards_of_turns_count_beside_weighted_ones(task, tmp_path):
    _, weighted = train(
        task, tmp_path / "weighted", "Talk", *HERE, "reward.weights={words=2.0}", "trainer.total_steps=1"
    )
    _, plain = train(task, tmp_path / "plain", "Talk", *HERE, "trainer.total_steps=1")
    scores, words = (read_jsonl(tmp_path / name / "rollouts.jsonl")[0] for name in ("plain", "weighted"))
    assert weighted[0]["critic/score/mean"] > 2 * plain[0]["reward/words/mean"]
    bonus = weighted[0]["critic/score/mean"] - 2 * plain[0]["reward/words/mean"]
    turns = [sum(number / 10 for number in range(count - 1)) + 0.25 for count in scores["turns"]]
    ended = [reason == "done" for reason in scores["finish_reason"]]
    assert all(ended)
    assert bonus == pytest.approx(sum(turns) / 12, abs=1e-5)
    assert scores["turns"] == words["turns"]


def test_several_environments_are_mixed_by_their_weights(tmp_path):
    write_episode_task(tmp_path)
    classes = f"environment.classes={{talk='{tmp_path}/environments.py:Talk', once='{tmp_path}/environments.py:Once'}}"
    with pytest.raises(ConfigError, match=r"rollout\.group_size"):
        train(tmp_path, tmp_path / "wrong", "Talk", classes, "rollout.group_size=1", *HERE)
    rows = [
        {"prompt": f"question {i}", "data_source": "talk" if i < 12 else "once", "extra_info": {"index": i}}
        for i in range(16)
    ]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = [classes, f"data.train_files=['{tmp_path}/mixed.jsonl']", *HERE]
    train(tmp_path, tmp_path / "run", "Talk", *mixed, "environment.weights={talk=0, once=1}")
    numbers = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    assert {source for row in numbers for source in row["data_source"]} == {"once"}
    assert {turns for row in numbers for turns in row["turns"]} == {1}
    train(tmp_path, tmp_path / "both", "Talk", *mixed)
    numbers = read_jsonl(tmp_path / "both" / "rollouts.jsonl")
    assert {source for row in numbers for source in row["data_source"]} == {"once", "talk"}


def test_a_source_without_an_environment_is_an_error_before_the_start(tmp_path):
    write_episode_task(tmp_path)
    classes = f"environment.classes={{walk='{tmp_path}/environments.py:Talk', once='{tmp_path}/environments.py:Once'}}"
    with pytest.raises(ConfigError, match=r"no environment serves data_source 'talk' in .*; environment\.classes has"):
        train(tmp_path, tmp_path / "run", "Talk", classes, *HERE)


def test_a_first_prompt_that_is_too_long_is_an_error_with_both_lengths(task, tmp_path):
    with pytest.raises(RewardError, match=r"first prompt has \d+ tokens, with the schemas of tools, more than data\."):
        train(task, tmp_path / "run", "Talk", *HERE, "data.max_prompt_length=100")


def test_a_run_with_environments_generates_plain_responses(task):
    config = load_config(None, episode_settings(task, "Talk", *HERE))
    with build_generator(config) as generator:
        (row,) = generator.run(typed_prompts(["question 1"]))
    assert isinstance(row["responses"][0], str)


def test_a_call_that_cannot_be_read_counts_as_a_wrong_call():
    turn = Turn(0, "", called=(CalledTool(ToolCall("f"), "1"),), malformed=("a call is not JSON",))
    played = PlayedEpisode(Episode({}, turns=[turn], ended="done"), [EpisodeRow([1])])
    columns = episode_batch([played], [0], [0], 1, chat_tokenizer("qwen2_5")).batch
    assert (columns["num_tool_calls"].tolist(), columns["num_tool_errors"].tolist()) == ([2], [1])
