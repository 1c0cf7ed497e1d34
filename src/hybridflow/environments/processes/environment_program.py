"""Program of an environment process: holds the environments of many episodes, and answers (episode, name, question).

Their classes are loaded where their objects live: there, or in the rank.

`beat` replies show that the event loop is not blocked; `num_stuck` counts calls of tools that were given up but still
run in their threads.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, BinaryIO

from hybridflow.environments.adapters import load as load_source
from hybridflow.environments.agents.agent import environment_class
from hybridflow.environments.episodes.answers import Answer, Finish, Question, RunAgent, ScoreGroup
from hybridflow.environments.episodes.environment import Environment
from hybridflow.environments.processes.arguments import LoadedReward, require_single
from hybridflow.environments.processes.connection import Replies, serve
from hybridflow.environments.processes.environment_kind import EnvironmentKind
from hybridflow.environments.processes.host import EnvironmentHost
from hybridflow.environments.processes.limited_calls import CallLimits, LimitedCalls
from hybridflow.runtime import user_code
from hybridflow.runtime.user_import import load_user_function

THREADS = 8
"""Threads of `asyncio.to_thread` for each call that may run."""

BEAT_S = 0.5
"""Seconds between two signs of life."""


class EnvironmentClasses:
    """The classes that the settings of an `EnvironmentPool` name, by name.

    Raises EnvironmentConfigError or RewardConfigError for one that cannot be loaded or used.
    """

    def __init__(self, settings: Mapping[str, Any], by_name: Callable[..., Any] = load_user_function) -> None:
        self.limits, closures = CallLimits(**settings["limits"]), settings["closures"]
        self._slots = asyncio.Semaphore(self.limits.concurrency)
        self._scored_by = reward = LoadedReward.load(settings, by_name) if settings["reward"][0] else None
        if reward:
            require_single(reward.function, reward.name, reward.kwargs)
        self._classes: dict[str, type[Environment]] = {}
        self.kinds: dict[str, EnvironmentKind] = {}
        for name, source in settings["classes"].items():
            if source in closures:
                found, digest = closures[source].function(), ""
            else:
                found, digest = load_source(source, f"environment.classes.{name}", by_name)
            self._classes[name] = environment_class(found, source)
            self.kinds[name] = EnvironmentKind.of(self._classes[name], source, digest, self._scored_by)

    def host(self, name: str) -> EnvironmentHost:
        """Return what holds an object of a class, for one episode."""
        return EnvironmentHost(self._classes[name], self.limits, self._slots, self._scored_by)


def load(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[BinaryIO, Replies], None]]:
    """Return the kinds of the classes, and what answers questions. Raises what their files raise."""
    classes = EnvironmentClasses(settings, user_code.load_user_function)
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
