"""Environments of the package `verifiers`, which plays and scores them itself, at the endpoint of an episode."""

import asyncio
import json
import signal

import pytest

from fixtures.scripted_session import ScriptedSession
from fixtures.tiny_episodes import write_episode_task
from hybridflow.environments.adapters import load, rows_of
from hybridflow.environments.agents.agent import AgentSession
from hybridflow.environments.agents.chat import RefusedError
from hybridflow.environments.agents.endpoint import Endpoint
from hybridflow.environments.episodes.messages import AssistantTurn, ToolCall
from hybridflow.errors import EnvironmentConfigError

pytestmark = [pytest.mark.runs, pytest.mark.own_run("episodes: environments of verifiers")]

MODULE = '''
import types

import verifiers as vf
from datasets import Dataset

SUMS = [{"question": f"{n} + {n}?", "answer": str(n + n), "info": {"n": n}} for n in range(20)]


async def right(completion, answer):
    return float(bool(completion) and completion[-1].content == answer)


def length(completion, info):
    return float(len(completion) + info["n"])


def letters(completion):
    return len(completion[-1].content) % 3 / 3 if completion else 0.0


def best(completions):
    return [0.0 for _ in completions]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
    """
    return a + b


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 2
        return state

    @vf.stop
    async def is_right(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]

    async def env_response(self, messages, state):
        state["left"] -= 1
        return [{"role": "user", "content": f"no, {state['left']} left"}]


def load_environment(kind="single", size=20, groups=False):
    if kind == "legs":
        return vf.ReasoningGymEnv("leg_counting", num_train_examples=4, num_eval_examples=2)
    if kind == "nothing":
        return types.SimpleNamespace(env_id="", env_args={})
    given = {
        "dataset": Dataset.from_list(SUMS[:size]),
        "rubric": vf.Rubric([right, best if groups else length, letters], [1.0, float(groups), 0.25]),
        "system_prompt": "Add.",
    }
    if kind == "evaluated":
        given["eval_dataset"] = Dataset.from_list(SUMS[:3])
    if kind == "tool":
        return vf.ToolEnv(tools=[add], **given)
    return Guess(max_turns=2, **given) if kind == "turns" else vf.SingleTurnEnv(**given)
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "vf_sums.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def play(source, *script, row=None):
    """Return what the agent returns for 3 + 3, and what it has asked of the model, which says what is written."""
    row = row or next(row for row in rows_of(source, "train", 20, 0) if row["reward_model"]["ground_truth"] == "6")
    agent, session = load(source, "environment.classes.a")[0], ScriptedSession(script)

    async def played():
        endpoint = Endpoint()
        await endpoint.start()
        endpoint.sessions["it"] = session
        try:
            given = {**row, "ground_truth": row["reward_model"]["ground_truth"]}
            return await agent(AgentSession(f"{endpoint.base_url}/it/v1", session.key), given)
        finally:
            await endpoint.stop()

    return asyncio.run(played()), session.requests


def test_a_rollout_is_that_of_the_package_and_its_rubric_scores_it():
    found, (request,) = play("verifiers:vf-sums", AssistantTurn("6"))
    assert found == {"score": 1.0 + 0.25 / 3, "right": 1.0, "length": 4.0, "letters": 1 / 3, "num_turns": 1.0}
    assert request.messages == ({"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 3?"})
    assert not request.tools
    asked = (request.temperature, request.top_p, request.top_k, request.max_tokens, request.stop)
    assert asked == (None, None, None, None, ())


def test_an_environment_that_comes_with_the_package_scores_the_right_answer():
    from hybridflow.environments.adapters.reasoning_gym import reasoning_gym  # without the warnings of its import

    source = "verifiers:vf_sums?kind=legs"
    entries = reasoning_gym.create_dataset("leg_counting", size=6, seed=0)
    assert sorted(row["reward_model"]["ground_truth"] for row in rows_of(source, "test", 9, 0)) == ["4", "5"]
    row = rows_of(source, "train", 4, 0)[0]
    right = entries[int(row["reward_model"]["ground_truth"])]["answer"]
    for text, score in ((f"<answer>{right}</answer>", 1.0), ("<answer>-1</answer>", 0.0)):
        assert play(source, AssistantTurn(text), row=row)[0]["score"] == score


def test_tools_of_the_package_answer_the_calls_of_the_model():
    calls = AssistantTurn("", calls=(ToolCall("add", {"a": 3, "b": 3}), ToolCall("subtract", {})))
    found, (first, second) = play("verifiers:vf_sums?kind=tool", calls, AssistantTurn("6", reasoning="read"))
    (tool,) = (each["function"] for each in first.tools)
    assert (tool["name"], tool["parameters"]["required"]) == ("add", ["a", "b"])
    assert "Add two numbers." in tool["description"]
    assert [(each["role"], each["content"]) for each in second.messages[3:]] == [("tool", "6"), ("tool", "'subtract'")]
    assert (found["right"], found["add_calls"], found["total_tool_calls"]) == (1.0, 1.0, 2.0)


def test_an_environment_of_several_turns_answers_the_model():
    found, (_, second) = play("verifiers:vf_sums?kind=turns", AssistantTurn("5"), AssistantTurn("6"))
    assert [each["content"] for each in second.messages] == ["Add.", "3 + 3?", "5", "no, 1 left"]
    assert (found["right"], found["num_turns"]) == (1.0, 2.0)


@pytest.mark.parametrize("end", [RefusedError(400, "max_turns", "the episode has 1 turn"), AssistantTurn("")])
def test_a_limit_and_an_empty_turn_end_a_rollout_that_is_scored(end):
    found, requests = play("verifiers:vf_sums?kind=turns", AssistantTurn("5"), end)
    assert len(requests) == 2
    assert (found["right"], found["length"], found["num_turns"]) == (0.0, 4.0, 1.0)


def test_a_request_that_fails_is_a_failure_and_not_a_score():
    with pytest.raises(RuntimeError, match=r"the rollout failed: ModelError.*the model is gone"):
        play("verifiers:vf_sums", RefusedError(410, "episode_ended", "the model is gone"))


def test_rows_are_those_of_the_data_sets_of_the_environment():
    def numbers(source, split, count=20, seed=0):
        rows = rows_of(source, split, count, seed)
        assert {row["data_source"] for row in rows} <= {"vf_sums"}
        return [json.loads(row["extra_info"]["input"])["info"]["n"] for row in rows]

    train, test = (numbers("verifiers:vf_sums", split) for split in ("train", "test"))
    assert len(test) == 2
    assert sorted(train + test) == [*range(20)]
    assert numbers("verifiers:vf_sums", "train", 3) == train[:3] != numbers("verifiers:vf_sums", "train", 3, 1)
    assert sorted(numbers("verifiers:vf_sums?kind=evaluated", "train")) == [*range(20)]
    assert sorted(numbers("verifiers:vf_sums?kind=evaluated", "test")) == [0, 1, 2]


def test_a_row_of_other_data_is_played_too():
    row = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "6"}, "extra_info": {"n": 3}}
    found, (request,) = play("verifiers:vf_sums", AssistantTurn("6"), row=row)
    assert [message["content"] for message in request.messages] == ["?"]
    assert (found["right"], found["length"]) == (1.0, 4.0)


def test_a_tiny_model_trains_on_an_environment_of_the_package(tmp_path, train):
    write_episode_task(tmp_path)
    assert train("verifiers:vf_sums?kind=turns")["episode/turns/mean"] > 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("verifiers:vf_no_sums", "ValueError: Could not import 'vf_no_sums' environment. Ensure the package"),
        ("verifiers:vf_sums?kinds=tool", "RuntimeError: Failed to load .* unexpected keyword argument 'kinds'"),
        ("verifiers:vf_sums?groups=true", "its rubric has functions of a whole group of rollouts"),
        ("verifiers:vf_sums?kind=nothing", "returned a SimpleNamespace; expected a verifiers.Environment"),
    ],
)
def test_an_environment_that_cannot_be_played_is_an_error(source, message):
    with pytest.raises(EnvironmentConfigError, match=f"^environment.classes.a=.*{message}"):
        load(source, "environment.classes.a")


def test_the_handlers_of_signals_stay_those_of_the_program():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    load("verifiers:vf_sums", "environment.classes.a")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
