"""Environments in processes of their own: the run continues if one hangs, crashes or is killed.

    question ──pickle──> process ──> environment of the episode ──> answer ──JSON──> player

A process holds the environments of many episodes. If it is lost, each episode begins again in another process with all
of its questions. One whose question was open at the loss asks them alone, in a new process, so that it cannot end
others; a second loss is a failure of that episode.
"""

import asyncio
import itertools
import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridflow.environments.episodes.answers import Answer, Question
from hybridflow.environments.episodes.kinds import EnvironmentKind
from hybridflow.environments.processes import reward_process
from hybridflow.environments.processes.client import LocalPlace, Place
from hybridflow.environments.processes.closure import Closure
from hybridflow.environments.processes.framed_process import FramedProcess, WrongReplyError
from hybridflow.environments.processes.host import CallLimits, EnvironmentHost
from hybridflow.errors import EnvironmentConfigError
from hybridflow.runtime import load_user_function

PROGRAM = Path(__file__).with_name("environment_process.py")

START_TIMEOUT_S = 120.0
"""Seconds for starting a process and importing the user's files."""

MOST_FAILED_STARTS = 2
"""Processes in a row that may end while they start; the next such end is an error of the user's files."""

GRACE_S = 10.0
"""Seconds beyond the limit of a call without a sign of life, after which a process is killed."""

WATCH_S = 0.5

END_S = 1.0
"""Seconds that calls may take to clean up when a pool is closed."""


class _LostError(Exception):
    """A process has ended, or was given up; `is_late`: since it gave no sign of life."""

    def __init__(self, problem: str, *, is_late: bool = False) -> None:
        super().__init__(problem)
        self.is_late = is_late


class EnvironmentPool:
    """The classes of a run's environments, and `num_processes` processes for their objects; 0: this process.

    `closures`: those of the classes that a Python program has given. The event loop runs in a thread, until `close` or
    the end of the pool. Raises EnvironmentConfigError if a class cannot be loaded.
    """

    def __init__(
        self,
        classes: Mapping[str, str],
        *,
        num_processes: int,
        limits: CallLimits,
        memory_bytes: int = 0,
        closures: Sequence[Closure] = (),
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self._limits, self._names = limits, list(classes)
        self._closures = {each.name: each for each in closures}
        self._thread = threading.Thread(target=_serve, args=[self.loop], name="environments", daemon=True)
        self._thread.start()
        self._processes: list[_Process | None] = [None] * num_processes
        self._starting = [asyncio.Lock() for _ in range(num_processes)]
        self._alone, self._ids = asyncio.Lock(), itertools.count()
        self._settings = json.dumps(
            {
                "classes": {name: self._resolved(source) for name, source in classes.items()},
                "by_value": list(self._closures),
                "reward_process": reward_process.__file__,
                "memory_bytes": memory_bytes,
                "timeout_s": limits.seconds,
                "concurrency": limits.concurrency,
            }
        )
        self._classes: dict[str, Any] = {}
        self._end = weakref.finalize(self, _end, self.loop, self._thread, self._processes)
        try:
            self.kinds = self._load_here(classes) if not num_processes else self._load_in_process()
        except BaseException:
            self.close()
            raise

    def _load_here(self, classes: Mapping[str, str]) -> dict[str, EnvironmentKind]:
        self._slots = asyncio.Semaphore(self._limits.concurrency)
        kinds = dict[str, EnvironmentKind]()
        found: Any
        for name, source in classes.items():
            if closure := self._closures.get(source):
                found, digest = closure.function(), ""
            else:
                key = f"environment.classes.{name}"
                found = load_user_function(source, key, EnvironmentConfigError, is_class=True)
                digest = reward_process.source_of(found)
            self._classes[name], kinds[name] = found, EnvironmentKind.of(found, source, digest)
        return kinds

    def _load_in_process(self) -> dict[str, EnvironmentKind]:
        process = asyncio.run_coroutine_threadsafe(self.shared(0), self.loop).result()
        return dict(zip(self._names, process.kinds, strict=True))

    def _resolved(self, source: str) -> str:
        """Return the name of a class with the whole path of its file."""
        path, _, name = source.rpartition(":")
        is_file = path.endswith(".py") and source not in self._closures
        return f"{Path(path).expanduser().resolve()}:{name}" if is_file else source

    def place(self, name: str, number: int) -> Place:
        """Return a place for the environment of an episode; `number` chooses its process."""
        if not self._processes:
            return LocalPlace(lambda: EnvironmentHost(self._classes[name], self._limits, self._slots))
        return _RemotePlace(self, name, number % len(self._processes))

    def renew(self, *, all_of_them: bool = False) -> None:
        """End processes, while no episode is played: those in which calls still run that were given up, or all."""

        async def renew() -> None:
            for number, process in enumerate(self._processes):
                if process and (process.num_stuck or all_of_them):
                    self._processes[number] = None
                    await process.stop("was renewed")

        if self._processes:
            asyncio.run_coroutine_threadsafe(renew(), self.loop).result()

    def close(self) -> None:
        """End all processes and the event loop."""
        self._end()

    async def shared(self, number: int) -> "_Process":
        """Return the process of this number, started if needed. Raises EnvironmentConfigError if it cannot be."""
        async with self._starting[number]:
            process = self._processes[number]
            if process is None or process.is_lost:
                process = self._processes[number] = await self._started()
            return process

    async def _started(self) -> "_Process":
        for _ in range(MOST_FAILED_STARTS):
            with suppress(_LostError):  # it may have been killed from outside
                return await self._started_once()
        try:
            return await self._started_once()
        except _LostError as lost:
            raise EnvironmentConfigError(f"the import of environment.classes: {lost}.") from lost

    async def _started_once(self) -> "_Process":
        process = _Process(self._settings, asyncio.get_running_loop(), self._limits.seconds)
        process.give({name: (each.contents, each.paths) for name, each in self._closures.items()})
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process.ready
        except TimeoutError as error:
            await process.stop("took too long to start")
            raise EnvironmentConfigError(
                f"the import of environment.classes took longer than {START_TIMEOUT_S:.0f} s; move slow work from the "
                "import of the file into the class."
            ) from error
        except BaseException:
            await process.stop("was not ready")
            raise
        return process

    async def ask_alone(self, name: str, questions: Sequence[Question]) -> Answer:
        """Ask all questions of an episode in a process of its own. Raises _LostError if it is lost too."""
        async with self._alone:
            process = await self._started()
            try:
                answer = Answer()
                for question in questions:
                    answer = await process.ask(0, name, question)
                return answer
            finally:
                await process.stop("has answered")

    def new_id(self) -> int:
        """Return an id for an object in a process."""
        return next(self._ids)


class _RemotePlace:
    """The environment of an episode in a process."""

    def __init__(self, pool: EnvironmentPool, name: str, number: int) -> None:
        self._pool, self._name, self._number = pool, name, number
        self._process: _Process | None = None
        self._id = self._num_had = 0
        self._failed: Answer | None = None

    async def run(self, questions: Sequence[Question]) -> Answer:
        """Ask the environment, see `Place.run`."""
        if self._failed:  # two processes were lost with a question: it is not asked again
            return self._failed
        try:
            process = await self._pool.shared(self._number)
            if process is not self._process:
                self._process, self._id, self._num_had = process, self._pool.new_id(), 0
            answer = Answer()
            for question in questions[self._num_had :]:
                answer = await process.ask(self._id, self._name, question)
                self._num_had += 1
            return answer
        except _LostError:
            self._process = None
        try:
            return await self._pool.ask_alone(self._name, questions)
        except _LostError as lost:
            self._failed = Answer(failure="timeout" if lost.is_late else "died", error=str(lost))
            return self._failed


class _Process(FramedProcess):
    """A process, and the answers that it owes."""

    def __init__(self, settings: str, loop: asyncio.AbstractEventLoop, limit_s: float | None) -> None:
        super().__init__(settings, PROGRAM, "environment")
        self._loop, self._limit_s, self._heard = loop, limit_s, time.monotonic()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.kinds: list[EnvironmentKind] = []
        self.is_lost = False
        self.num_stuck = 0
        self._killing: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        loop.add_reader(self.connection, self._read)
        self._watching = loop.create_task(self._watch())

    def give(self, classes: Mapping[str, tuple[bytes, tuple[str, ...]]]) -> None:
        """Send the classes that travel by value, before any question."""
        if classes:
            self.put(classes)
            self._write()

    async def ask(self, episode: int, name: str, question: Question) -> Answer:
        """Return the answer to a question. Raises _LostError if the process is lost before."""
        if self.is_lost:
            raise _LostError("the process was lost before")
        number = next(self._numbers)
        answer = self._asked[number] = self._loop.create_future()
        self.put((number, episode, name, question))
        self._write()
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    async def stop(self, problem: str) -> None:
        """End the process, with all that it has started."""
        self.give_up(problem)
        await self._kill()

    def give_up(self, problem: str) -> None:
        """Expect nothing of the process any more."""
        self._watching.cancel()
        self._lose(_LostError(f"the process of the environment {problem}"))

    @property
    def is_ended(self) -> bool:
        """Whether the process was ended."""
        return self._killing is not None and self._killing.done() and not self._killing.cancelled()

    def _write(self) -> None:
        self.send()
        if self._to_send:
            self._loop.add_writer(self.connection, self._write)
        else:
            self._loop.remove_writer(self.connection)

    def _read(self) -> None:
        try:
            if not self.receive():
                self._loop.remove_reader(self.connection)  # `_watch` finds how it ended
                return
            for message in self.messages():
                self._handle(message)
        except BlockingIOError:
            return
        except (WrongReplyError, ValueError, KeyError, TypeError) as error:
            self._lose(_LostError(f"the process of the environment {error}"))

    def _handle(self, message: Mapping[str, Any]) -> None:
        self._heard = time.monotonic()
        if "beat" in message:
            self.num_stuck = int(message.get("num_stuck", 0))
        elif "not_loaded" in message and not self.ready.done():
            self.ready.set_exception(EnvironmentConfigError(str(message["not_loaded"])))
        elif "ready" in message and not self.ready.done():
            self.kinds = [EnvironmentKind.of_message(kind) for kind in message["kinds"]]
            self.ready.set_result(None)
        elif (answer := self._asked.get(int(message["number"]))) and not answer.done():
            answer.set_result(Answer.of_message(message["answer"]))

    async def _watch(self) -> None:
        """Lose the process when it has exited, or has given no sign of life for too long."""
        while not self.is_lost:
            await asyncio.sleep(WATCH_S)
            if self.popen.poll() is not None:
                self._lose(_LostError(f"the process of the environment ended: {self.end()}"))
            limit = None if self._limit_s is None else self._limit_s + GRACE_S
            if limit and self.ready.done() and time.monotonic() - self._heard > limit:
                self._lose(
                    _LostError(
                        f"the process of the environment gave no sign of life for {limit:g} s: an `async` method does "
                        "not return to the event loop; await in it, or make it a plain one",
                        is_late=True,
                    )
                )
        await self._kill()

    async def _kill(self) -> None:
        self._killing = self._killing or self._loop.create_task(asyncio.to_thread(self.kill))
        await asyncio.shield(self._killing)

    def _lose(self, error: _LostError) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        with suppress(OSError, ValueError):
            self._loop.remove_reader(self.connection)
            self._loop.remove_writer(self.connection)
        for future in (self.ready, *self._asked.values()):
            if not future.done():
                future.set_exception(error)
        if self.ready.done() and not self.ready.cancelled():
            self.ready.exception()  # it is known, also if no start waits for it


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, which may be after `_end` if user code blocks it, and close it."""
    try:
        loop.run_forever()
    finally:  # SystemExit of user code in this process ends it
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, processes: "list[_Process | None]") -> None:
    """End all, also where the garbage collector calls it: in any thread, which may hold locks that others wait for."""

    async def end() -> None:
        for process in filter(None, processes):
            process.give_up("was closed")
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=END_S)
        loop.stop()

    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is not thread:
        thread.join(2 * END_S)  # user code in this process may block it
    for process in filter(None, processes):
        if not process.is_ended:
            process.kill()  # in this thread, since an interpreter that ends starts no others
    processes.clear()
