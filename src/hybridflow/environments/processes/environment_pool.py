"""Environments in processes of their own: the run continues if one hangs, crashes or is killed.

    question ──pickle──> process ──> environment of the episode ──> answer ──JSON──> player

A process holds the environments of many episodes. If it is lost, each episode begins again in another process with all
of its questions. One whose question was open at the loss asks them alone, in a new process, so that it cannot end
others; a second loss is a failure of that episode.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from hybridflow.environments.episodes.answers import Answer, Question
from hybridflow.environments.processes.client import EnvironmentHandle, LocalEnvironment
from hybridflow.environments.processes.closure import Closure
from hybridflow.environments.processes.environment_kind import EnvironmentClasses, EnvironmentKind
from hybridflow.environments.processes.limited_calls import CallLimits
from hybridflow.environments.processes.pool import ProcessPool, resolved
from hybridflow.environments.processes.user_process import LostError, Reason, UserProcess

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Seconds beyond the limit of a call without a sign of life, after which a process is killed."""


ALONE = 4
"""Processes of their own that start at a time, for episodes whose process was lost; of environments, that run."""

AskAgent = Callable[[Question, bool], Awaitable[Answer]]
"""Asks the agent of one episode, in a shared process or alone in a new one. Raises LostError if it is lost."""


class _EnvironmentProcess(UserProcess):
    """A process with the classes, which reports again and again that its event loop is not blocked."""

    def __init__(self, silence_s: float | None) -> None:
        super().__init__("environment")
        self._silence_s, self.num_stuck = silence_s, 0

    def handle(self, message: Mapping[str, Any]) -> None:
        if "beat" not in message:
            super().handle(message)
            return
        num_stuck = message.get("num_stuck")
        self.num_stuck = num_stuck if isinstance(num_stuck, int) else 0
        self.limit_silence()

    def lose(self, problem: str, reason: Reason) -> None:
        """Also log a process that is late: its episodes begin again, which may take long before one of them fails."""
        if reason == "late" and not self.is_lost:
            logger.warning("A process of environments %s. Its episodes begin again.", problem)
        super().lose(problem, reason)

    def limit_silence(self) -> None:
        """Lose the process if it gives no other sign of life in time."""
        if self._silence_s is not None:
            self.set_time_limit(
                self._silence_s,
                f"gave no sign of life for {self._silence_s:g} s: an `async` method or agent blocks the event loop; "
                "await in it (AsyncOpenAI in place of OpenAI), or make the method a plain one",
            )


class EnvironmentPool(ProcessPool[_EnvironmentProcess]):
    """The classes of a run's environments, and `num_processes` processes for their objects; 0: this process.

    `reward_function` scores the episodes of classes without `reward`. `closures`: the classes and the function that a
    Python program has given. Raises EnvironmentConfigError or RewardConfigError for one that cannot be loaded or used.
    """

    def __init__(
        self,
        classes: Mapping[str, str],
        *,
        num_processes: int,
        limits: CallLimits,
        memory_bytes: int = 0,
        reward_function: str = "",
        reward_kwargs: Mapping[str, Any] = MappingProxyType({}),
        closures: Sequence[Closure] = (),
    ) -> None:
        self._shared: list[_EnvironmentProcess | None] = [None] * num_processes
        self._starting = [asyncio.Lock() for _ in range(num_processes)]
        self._alone, self.ids = asyncio.Semaphore(ALONE), itertools.count()  # of objects in processes
        named, reward_function = {name: resolved(each) for name, each in classes.items()}, resolved(reward_function)
        settings = {
            "what": "environment.classes",
            "sources": [*named.values(), reward_function],
            "classes": named,
            "reward": (reward_function, dict(reward_kwargs)),
            "closures": {each.name: each for each in closures},
            "memory_bytes": memory_bytes,
            "timeout_s": limits.seconds,
            "limits": asdict(limits),
        }
        super().__init__("environments", settings, dict[str, EnvironmentKind])
        try:
            if num_processes:
                self.kinds: dict[str, EnvironmentKind] = {}
                self._run(self.shared(0))
            else:
                self._here = EnvironmentClasses(settings)
                self.kinds = self._here.kinds
        except BaseException:
            self.close()
            raise

    def environment(self, name: str, number: int) -> EnvironmentHandle:
        """Return a handle of the environment of one episode; `number` chooses its process."""
        if not self._shared:
            return LocalEnvironment(lambda: self._here.host(name))
        return _RemoteEnvironment(self, name, number % len(self._shared))

    def agent(self, name: str, number: int) -> AskAgent:
        """Return what asks the agent of one episode; `number` chooses its process."""
        if not self._shared:
            host = self._here.host(name)
            return lambda question, is_alone: host.answer(question)
        agent_id = next(self.ids)

        async def ask(question: Question, is_alone: bool) -> Answer:
            if is_alone:
                async with self._alone:  # not until it answers: it waits for the model, which may wait for others
                    process = await self._start()
                return await self._ask_only(process, name, [question])
            process = await self.shared(number % len(self._shared))
            return await process.answer(_answer_of, agent_id, name, question)

        return ask

    def renew(self, *, all_of_them: bool = False) -> None:
        """End processes, while no episode is played: those in which calls still run that were given up, or all."""

        async def renew() -> None:
            for process in filter(None, self._shared):
                if process.num_stuck or all_of_them:
                    await process.stop("was renewed")

        if self._shared:
            self._run(renew())

    async def shared(self, number: int) -> _EnvironmentProcess:
        """Return the process of this number, started if needed. Raises EnvironmentConfigError if it cannot be."""
        async with self._starting[number]:
            process = self._shared[number]
            if process is None or process.is_lost:
                process = self._shared[number] = await self._start()
            return process

    async def _start(self) -> _EnvironmentProcess:
        timeout_s = self._settings["timeout_s"]
        process, self.kinds = await self._started(
            lambda: _EnvironmentProcess(None if timeout_s is None else timeout_s + GRACE_S)
        )
        process.limit_silence()
        return process

    async def ask_alone(self, name: str, questions: Sequence[Question]) -> Answer:
        """Ask all questions of an episode in a process of its own. Raises LostError if it is lost too."""
        async with self._alone:
            return await self._ask_only(await self._start(), name, questions)

    async def _ask_only(self, process: _EnvironmentProcess, name: str, questions: Sequence[Question]) -> Answer:
        try:
            answer = Answer()
            for question in questions:
                answer = await process.answer(_answer_of, 0, name, question)
            return answer
        finally:
            await process.stop("has answered")


class _RemoteEnvironment:
    def __init__(self, pool: EnvironmentPool, name: str, number: int) -> None:
        self._pool, self._name, self._number = pool, name, number
        self._process: _EnvironmentProcess | None = None
        self._id = self._num_had = 0
        self._failed: Answer | None = None

    async def ask(self, questions: Sequence[Question]) -> Answer:
        if self._failed:  # two processes were lost with a question: it is not asked again
            return self._failed
        try:
            process = await self._pool.shared(self._number)
            if process is not self._process:
                self._process, self._id, self._num_had = process, next(self._pool.ids), 0
            answer = Answer()
            for question in questions[self._num_had :]:
                answer = await process.answer(_answer_of, self._id, self._name, question)
                self._num_had += 1
            return answer
        except LostError:
            self._process = None
        try:
            return await self._pool.ask_alone(self._name, questions)
        except LostError as lost:
            self._failed = failure_of(lost)
            return self._failed


def failure_of(lost: LostError) -> Answer:
    """Return the answer to a question that two processes were lost with."""
    return Answer(failure="timeout" if lost.reason == "late" else "died", error=str(lost))


def _answer_of(message: Mapping[str, Any]) -> Answer:
    return Answer.of_message(message["answer"])
