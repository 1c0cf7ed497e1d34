"""Program of an environment process: holds the environments of many episodes, and answers (episode, name, question).

`beat` replies show that the event loop is not blocked; `num_stuck` counts calls of tools that were given up but still
run in their threads.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, BinaryIO

from hybridflow.environments.episodes.answers import Answer, Finish, Question, RunAgent, ScoreGroup
from hybridflow.environments.processes.connection import Replies, serve
from hybridflow.environments.processes.environment_kind import EnvironmentClasses
from hybridflow.environments.processes.host import EnvironmentHost
from hybridflow.environments.processes.limited_calls import LimitedCalls
from hybridflow.runtime.user_code import load_user_function

THREADS = 8
"""Threads of `asyncio.to_thread` for each call that may run."""

BEAT_S = 0.5
"""Seconds between two signs of life."""


def load(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[BinaryIO, Replies], None]]:
    """Return the kinds of the classes, and what answers questions. Raises what their files raise."""
    classes = EnvironmentClasses(settings, load_user_function)
    kinds = {name: asdict(kind) for name, kind in classes.kinds.items()}
    return kinds, lambda questions, replies: asyncio.run(_serve(classes, questions, replies))


async def _serve(classes: EnvironmentClasses, questions: BinaryIO, replies: Replies) -> None:
    threads = ThreadPoolExecutor(THREADS * classes.limits.concurrency)  # of agents that all wait for the model
    asyncio.get_running_loop().set_default_executor(threads)
    hosts: dict[int, EnvironmentHost] = {}

    async def answer(episode: int, name: str, question: Question) -> dict[str, Any]:
        host = hosts.get(episode) or hosts.setdefault(episode, classes.host(name))
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
            replies.send({"beat": True, "num_stuck": LimitedCalls.num_stuck})
            await asyncio.sleep(BEAT_S)

    beating = asyncio.create_task(beat())
    await serve(answer, questions, replies)
    beating.cancel()
    os._exit(0)  # calls of the user's code may still run
