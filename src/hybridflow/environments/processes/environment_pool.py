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
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybridflow.config.environment_sources import scheme_of
from hybridflow.environments.adapters import load
from hybridflow.environments.agents.agent import environment_class
from hybridflow.environments.episodes.answers import Answer, Question
from hybridflow.environments.processes.client import EnvironmentHandle, LocalEnvironment
from hybridflow.environments.processes.closure import Closure
from hybridflow.environments.processes.episode_reward import EpisodeReward
from hybridflow.environments.processes.host import CallLimits, EnvironmentHost, EnvironmentKind
from hybridflow.environments.processes.pool import START_TIMEOUT_S, LostError, ProcessPool, Reason, UserProcess
from hybridflow.errors import EnvironmentConfigError

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
        self._limits, self._closures = limits, {each.name: each for each in closures}
        self._shared: list[_EnvironmentProcess | None] = [None] * num_processes
        self._starting = [asyncio.Lock() for _ in range(num_processes)]
        self._alone, self._ids = asyncio.Semaphore(ALONE), itertools.count()
        self._scored_by: EpisodeReward | None = None
        named = {name: self._resolved(source) for name, source in classes.items()}
        reward_function = self._resolved(reward_function)
        self._settings = {
            "sources": [*named.values(), reward_function],
            "classes": named,
            "reward": (reward_function, dict(reward_kwargs)),
            "closures": {name: (each.contents, each.paths) for name, each in self._closures.items()},
            "memory_bytes": memory_bytes,
            "timeout_s": limits.seconds,
            "concurrency": limits.concurrency,
            "agent_timeout_s": limits.agent_seconds,
        }
        self._classes: dict[str, Any] = {}
        super().__init__("environments")
        try:
            if num_processes:
                self.kinds: dict[str, EnvironmentKind] = {}
                self._run(self.shared(0))
            else:
                self.kinds = self._load_here(classes)
        except BaseException:
            self.close()
            raise

    def _load_here(self, classes: Mapping[str, str]) -> dict[str, EnvironmentKind]:
        self._slots = asyncio.Semaphore(self._limits.concurrency)
        kinds = dict[str, EnvironmentKind]()
        self._scored_by = EpisodeReward.load(self._settings)
        found: Any
        for name, source in classes.items():
            if closure := self._closures.get(source):
                found, digest = closure.function(), ""
            else:
                found, digest = load(source, f"environment.classes.{name}")
            self._classes[name] = environment_class(found, source)
            kinds[name] = EnvironmentKind.of(self._classes[name], source, digest, self._scored_by)
        return kinds

    def _resolved(self, source: str) -> str:
        """Return the name of a class with the whole path of its file."""
        path, _, name = source.rpartition(":")
        is_file = path.endswith(".py") and source not in self._closures and not scheme_of(source)
        return f"{Path(path).expanduser().resolve()}:{name}" if is_file else source

    def environment(self, name: str, number: int) -> EnvironmentHandle:
        """Return a handle of the environment of one episode; `number` chooses its process."""
        if not self._shared:
            return LocalEnvironment(
                lambda: EnvironmentHost(self._classes[name], self._limits, self._slots, self._scored_by)
            )
        return _RemoteEnvironment(self, name, number % len(self._shared))

    def agent(self, name: str, number: int) -> AskAgent:
        """Return what asks the agent of one episode; `number` chooses its process."""
        if not self._shared:
            host = EnvironmentHost(self._classes[name], self._limits, self._slots, self._scored_by)
            return lambda question, is_alone: host.answer(question)
        agent_id = self.new_id()

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
        silence_s = None if self._limits.seconds is None else self._limits.seconds + GRACE_S
        try:
            process, kinds = await self._started(
                lambda: _EnvironmentProcess(silence_s), self._settings, _kinds_of, START_TIMEOUT_S
            )
        except LostError as lost:
            problem = f": {_described(lost)}"
            if lost.reason == "late":
                problem = (
                    f" took longer than {START_TIMEOUT_S:.0f} s; move slow work from the import of the file into the "
                    "class"
                )
            raise EnvironmentConfigError(f"the import of environment.classes{problem}.") from lost
        process.limit_silence()
        self.kinds = kinds
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

    def new_id(self) -> int:
        """Return an id for an object in a process."""
        return next(self._ids)


class _RemoteEnvironment:
    """The environment of an episode in a process."""

    def __init__(self, pool: EnvironmentPool, name: str, number: int) -> None:
        self._pool, self._name, self._number = pool, name, number
        self._process: _EnvironmentProcess | None = None
        self._id = self._num_had = 0
        self._failed: Answer | None = None

    async def ask(self, questions: Sequence[Question]) -> Answer:
        """Return the answer to the last question, see `EnvironmentHandle.ask`."""
        if self._failed:  # two processes were lost with a question: it is not asked again
            return self._failed
        try:
            process = await self._pool.shared(self._number)
            if process is not self._process:
                self._process, self._id, self._num_had = process, self._pool.new_id(), 0
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
    return Answer(failure="timeout" if lost.reason == "late" else "died", error=_described(lost))


def _kinds_of(message: Mapping[str, Any]) -> dict[str, EnvironmentKind] | EnvironmentConfigError:
    """Return what a process says of the classes that it has loaded, or the error with which it could not."""
    if "not_loaded" in message:
        return EnvironmentConfigError(str(message["not_loaded"]))
    return {name: EnvironmentKind.of_message(kind) for name, kind in message["kinds"].items()}


def _answer_of(message: Mapping[str, Any]) -> Answer:
    return Answer.of_message(message["answer"])


def _described(lost: LostError) -> str:
    return f"its process {'ended: ' if lost.reason == 'exited' else ''}{lost}"
