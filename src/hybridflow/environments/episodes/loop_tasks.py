"""Coroutines of many episodes on the event loop of their environments, as the thread of the engine waits for them."""

import asyncio
import queue
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from hybridflow.errors import EnvironmentConfigError, RolloutError
from hybridflow.runtime.progress import note_progress

WAIT_S = 1.0
"""Seconds after which a wait for environments reports progress, so that a deadline of the process is not theirs."""


class LoopTasks:
    """Coroutines of episodes on an event loop in another thread, which goes on within `limit_s`, and their results."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float | None) -> None:
        self._loop, self._limit_s = loop, limit_s
        self._asked: float | None = None  # since when the loop owes a sign of life
        self._running: dict[int, int | None] = {}  # by episode: the step since which it is waited for, if it is
        self._tasks: dict[int, asyncio.Task[Any]] = {}  # the same, those that have begun; for the loop
        self._queue = queue.SimpleQueue[tuple[int, asyncio.Task[Any]]]()
        self._done: dict[int, asyncio.Task[Any]] = {}  # taken from the queue

    def __bool__(self) -> bool:
        """Return whether some have not been returned."""
        return bool(self._running)

    def start(self, coroutines: Mapping[int, Coroutine[Any, Any, Any]], step: int | None = None) -> None:
        """Run coroutines by episode, which has no other one. The loop is woken once for all.

        Those without a `step` are not waited for until `wait_from`.
        """
        if coroutines:
            self._running.update(dict.fromkeys(coroutines, step))
            try:
                self.call(self._begin, coroutines)
            except EnvironmentConfigError:
                for coroutine in coroutines.values():
                    coroutine.close()
                raise

    def wait_from(self, number: int, step: int) -> None:
        """Wait for the coroutine of an episode as if it had been started at a step."""
        if number in self._running:
            self._running[number] = step

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the loop. Raises EnvironmentConfigError if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError as error:
            raise EnvironmentConfigError(
                "the event loop of the environments has ended while episodes were played: their pool was closed, or an "
                "environment in this process ended it, as sys.exit() in a task does; close the pool after the episodes."
            ) from error

    def oldest(self, started_before: int | None = None) -> list[int]:
        """Return the episodes whose coroutines were started up to a step, in the order of steps and numbers."""
        started = sorted((step, number) for number, step in self._running.items() if step is not None)
        return [number for step, number in started if started_before is None or step <= started_before]

    def wait(self, numbers: Sequence[int]) -> list[tuple[int, Any]]:
        """Wait for the coroutines of these episodes; return what they, and those not waited for, returned.

        Raises what one raised.
        """
        self._wait(lambda: all(number in self._done for number in numbers))
        others = [number for number in self._done if self._running[number] is None]
        return [(number, self._pop(number)) for number in (*numbers, *others)]

    def has(self, numbers: Sequence[int], seconds: float, *, may_go_on: bool) -> bool:
        """Return whether these episodes have all returned.

        Wait for that, but after `seconds` only as long as none has returned and not `may_go_on`.
        """
        until = time.monotonic() + seconds
        self._wait(
            lambda: self._done.keys() >= set(numbers) or (time.monotonic() > until and (may_go_on or bool(self._done)))
        )
        return self._done.keys() >= set(numbers)

    def some(self, count: int) -> list[tuple[int, Any]]:
        """Wait until `count` coroutines have returned, if so many run; return what all that have done returned."""
        self._wait(lambda: len(self._done) >= min(count, len(self._running)))
        return [(number, self._pop(number)) for number in list(self._done)]

    def cancel(self) -> None:
        """Cancel what runs, unless the loop has ended."""
        with suppress(EnvironmentConfigError):
            self.call(self._cancel)

    def _begin(self, coroutines: Mapping[int, Coroutine[Any, Any, Any]]) -> None:
        for number, coroutine in coroutines.items():
            self._tasks[number] = task = self._loop.create_task(coroutine)
            task.add_done_callback(partial(self._end, number))

    def _end(self, number: int, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            task.exception()  # asyncio need not report it: who waits will
        del self._tasks[number]
        self._queue.put((number, task))

    def _cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _pop(self, number: int) -> Any:
        del self._running[number]
        try:
            return self._done.pop(number).result()
        except asyncio.CancelledError as error:
            raise RolloutError(
                "the pool of environments was closed while episodes were played; close it later."
            ) from error

    def _wait(self, is_enough: Callable[[], bool]) -> None:
        """Take what coroutines return until it is enough, and what else has returned by then."""
        while True:
            while not self._queue.empty():
                number, task = self._queue.get()
                self._done[number] = task
            if is_enough():
                return
            try:
                number, task = self._queue.get(timeout=WAIT_S)
                self._done[number] = task
            except queue.Empty:
                self._require_running()
            note_progress()

    def _require_running(self) -> None:
        """Raise EnvironmentConfigError if the loop has ended, or something has blocked it for too long."""
        asked = self._asked
        if asked is None:
            self._asked = time.monotonic()
            self.call(self._hear)
        elif self._limit_s is not None and time.monotonic() - asked > self._limit_s:
            raise EnvironmentConfigError(
                f"an episode has not gone on for {self._limit_s:g} s: the chat template of model.path does not end for "
                "its messages. `hybridflow check-template` shows whether a template serves episodes."
            )

    def _hear(self) -> None:
        self._asked = None
