"""What an agent does wrong is an error that says where, and what to do."""

import asyncio

import pytest

from hybridflow.environments import Agent, CallLimits
from hybridflow.environments.adapters import load
from hybridflow.environments.agents.agent import environment_class
from hybridflow.environments.episodes.answers import Finish, RunAgent
from hybridflow.environments.episodes.environment import Episode
from hybridflow.environments.processes.host import EnvironmentHost
from hybridflow.errors import EnvironmentConfigError


def error_of(agent, question):
    limits = CallLimits(60.0, agent_seconds=0.05)
    return asyncio.run(EnvironmentHost(agent, limits).answer(question)).error


async def raises(session, row):
    return row["answer"]


async def waits(session, row):
    await asyncio.sleep(60)


async def answers_nothing(session, row):
    return {}


def test_an_agent_that_raises_or_is_late_is_an_error_with_its_line_or_the_key():
    error = error_of(environment_class(raises, "raises"), RunAgent({}, "http://a/v1", "key"))
    assert error.startswith(f"the agent raised KeyError: 'answer' at {__file__}:")
    assert error.endswith(', in raises: `return row["answer"]`')
    worthless = error_of(environment_class(answers_nothing, "x"), RunAgent({}, "http://a/v1", "key"))
    assert worthless == "the agent returned no values; expected a finite number, or several by name"
    late = error_of(environment_class(waits, "waits"), RunAgent({}, "http://a/v1", "key"))
    assert late == "the agent took longer than agent.timeout_s=0.05"


def test_an_episode_without_a_reward_shows_what_the_command_has_printed():
    ended = Finish("done", episode=Episode({}))
    assert error_of(Agent, ended).startswith("the agent gave no reward; return a number")
    printed = error_of(type("Printed", (Agent,), {"output": "reward: 0.5\n"}), ended)
    assert r"the agent gave no reward (its output ends with 'reward: 0.5\n'); return a number, print it as" in printed


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("command:", "names no command"),
        ("command:sh 'x", "check its quotes"),
        (f"{__file__}:slove", "has no class 'slove'; it has raises, waits"),
        (f"{__file__}:error_of", "neither a class nor an `async` function"),
    ],
)
def test_a_source_that_is_not_an_agent_is_an_error_at_the_start(source, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        environment_class(load(source, "environment.classes.a")[0], source)
