"""Entry point of an environment process: holds the environments of many episodes, and answers their questions.

It is started as a file. The first question has the settings, a later one is (number, episode, name, question); a reply
has the number and the answer, see reward_process.py. `beat` replies show that the event loop is not blocked;
`num_stuck` counts calls of tools that were given up but still run in their threads.
"""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

sys.path.append(os.getcwd())  # where hybridflow is, if it is not installed

from hybridflow.environments.processes.reward_process import (
    Replies,
    begin,
    by_value,
    described,
    serve,
)

THREADS = 8
"""Threads of `asyncio.to_thread` for each call that may run."""

BEAT_S = 0.5
"""Seconds between two signs of life."""


def main() -> None:
    """Load the classes that the settings name, and answer questions until stdin ends."""
    settings, replies, questions = begin()
    from hybridflow.environments.adapters import load  # within the limits of this process
    from hybridflow.environments.agents.agent import environment_class
    from hybridflow.environments.processes.episode_reward import EpisodeReward
    from hybridflow.environments.processes.host import EnvironmentKind
    from hybridflow.errors import ConfigError
    from hybridflow.runtime.user_code import load_user_function

    classes: dict[str, Any] = {}
    try:
        kinds = {}
        scored_by = EpisodeReward.load(settings)
        for name, source in settings["classes"].items():
            if source in settings["closures"]:
                found, digest = by_value(*settings["closures"][source]), ""
            else:
                found, digest = load(source, f"environment.classes.{name}", load_user_function)
            classes[name] = environment_class(found, source)
            kinds[name] = EnvironmentKind.of(classes[name], source, digest, scored_by).to_message()
    except BaseException as error:  # a user's file may raise anything
        is_ours = isinstance(error, ConfigError)
        replies.send({"number": 0, "not_loaded": str(error) if is_ours else described(error, None)})
        return
    replies.send({"number": 0, "kinds": kinds})
    asyncio.run(_serve(classes, scored_by, questions, replies, settings))


async def _serve(
    classes: dict[str, Any], scored_by: Any, questions: BinaryIO, replies: Replies, settings: dict[str, Any]
) -> None:
    from hybridflow.environments.episodes.answers import Answer, Finish, RunAgent, ScoreGroup
    from hybridflow.environments.processes.host import CallLimits, EnvironmentHost

    limits = CallLimits(settings["timeout_s"], settings["concurrency"], settings["agent_timeout_s"])
    slots = asyncio.Semaphore(limits.concurrency)
    threads = ThreadPoolExecutor(THREADS * limits.concurrency)  # of agents that all wait for the model
    asyncio.get_running_loop().set_default_executor(threads)
    hosts: dict[int, EnvironmentHost] = {}

    async def answer(episode: int, name: str, question: Any) -> dict[str, Any]:
        host = hosts.get(episode) or hosts.setdefault(episode, EnvironmentHost(classes[name], limits, slots, scored_by))
        try:
            found = await host.answer(question)
        except BaseException as error:  # user code may cancel all tasks; an answer is owed in any case
            found = Answer(failure="raised", error=f"the episode was cancelled: {type(error).__name__}")
        is_over = isinstance(question, RunAgent) and (found.failure or found.rewards is not None)
        if is_over or isinstance(question, Finish | ScoreGroup):
            hosts.pop(episode, None)
        return {"answer": found.to_message()}

    async def beat() -> None:
        while True:
            replies.send({"beat": True, "num_stuck": EnvironmentHost.num_stuck})
            await asyncio.sleep(BEAT_S)

    beating = asyncio.create_task(beat())
    await serve(answer, questions, replies)
    beating.cancel()
    os._exit(0)  # calls of the user's code may still run


if __name__ == "__main__":
    main()
