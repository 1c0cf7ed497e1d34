"""`verifiers:NAME`, or `verifiers:NAME?key=value` with arguments of `load_environment`: an agent.

The package plays and scores a rollout with its own environment, client and rubric; only the address of the model is
that of the episode. It sends no sampling parameters: turns are sampled as the run says.
"""

import json
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI, BadRequestError
from verifiers.legacy.clients import OpenAIChatCompletionsClient

from hybridflow.environments.adapters import arguments_of
from hybridflow.environments.agents.agent import AgentSession
from hybridflow.errors import EnvironmentConfigError

LIMITS = ("max_turns", "max_seconds", "max_rows", "context_length_exceeded")
"""Codes of the endpoint for a request beyond a limit of the episode."""

TEST_ROWS = 10
"""Without a data set for evaluation, every tenth row is a test row."""


class EpisodeChatClient(OpenAIChatCompletionsClient):
    """The package's client; a limit of the episode and a turn without a text end the rollout as too long a prompt does.

    Its rubric then scores what happened.
    """

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        """Return the turn of the model."""
        try:
            return await super().get_native_response(*args, **kwargs)
        except BadRequestError as error:
            if error.code in LIMITS:
                raise vf.OverlongPromptError from error
            raise

    async def raise_from_native_response(self, response: Any) -> None:
        """Raise OverlongPromptError for an empty turn."""
        try:
            await super().raise_from_native_response(response)
        except vf.EmptyModelResponseError as error:
            raise vf.OverlongPromptError from error


def make(rest: str) -> Callable[[AgentSession, Mapping[str, Any]], Awaitable[dict[str, float]]]:
    """Return the agent of an environment. Raises EnvironmentConfigError if its rubric compares rollouts."""
    environment = _environment(rest)
    if any(each.requires_group_rollouts for each in (environment, *getattr(environment, "envs", ()))):
        raise EnvironmentConfigError(
            "its rubric has functions of a whole group of rollouts, but episodes are scored one by one; leave those "
            "functions out, or write an Environment with `group_rewards`."
        )

    async def agent(session: AgentSession, row: Mapping[str, Any]) -> dict[str, float]:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=None) as client:
            output = await environment.run_rollout(_input_of(row), EpisodeChatClient(client), "hybridflow", {})
        if output["error"]:
            raise RuntimeError(f"the rollout failed: {output['error']['error_chain_repr']}")
        return {**output["metrics"], "score": output["reward"]}

    return agent


def rows(rest: str, split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows of the environment's data set, shuffled; "test" has those of its data set for evaluation."""
    environment = _environment(rest)
    is_test, has_test = split == "test", environment.eval_dataset_source is not None
    data_set = environment.get_eval_dataset if is_test and has_test else environment.get_dataset
    for number, row in enumerate(data_set(seed=seed)):
        if not has_test and (number % TEST_ROWS == 0) != is_test:
            continue
        prompt, answer = row["prompt"], row.get("answer", "")
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        yield {
            "prompt": [{name: value for name, value in each.items() if value is not None} for each in given],
            "data_source": environment.env_id,
            "reward_model": {
                "style": "rule",
                "ground_truth": answer if isinstance(answer, str) else json.dumps(answer),
            },
            "extra_info": {"input": json.dumps(row)},
        }


def _input_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row as the package's data set has it; one of other data has a prompt, an answer and its columns."""
    info = row["extra_info"] or {}
    if "input" in info:
        return json.loads(info["input"])
    return {"prompt": row["prompt"], "answer": row["ground_truth"], "info": dict(info), "example_id": 0}


def _environment(rest: str) -> Any:
    name, arguments = arguments_of(rest)
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        environment = vf.load_environment(name, **arguments)
    finally:
        for number, handler in handlers.items() if is_main else ():
            signal.signal(number, handler)  # an environment sets its own
    if not isinstance(environment, vf.Environment):
        found = f"load_environment of '{name}' returned a {type(environment).__name__}"
        raise EnvironmentConfigError(f"{found}; expected a verifiers.Environment (of v1 there are no adapters).")
    return environment
