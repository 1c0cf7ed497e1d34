"""Calls of the user's code on an event loop: each within its time, a bounded number at a time.

A call that was given up may go on: a thread cannot be ended, and a coroutine may ignore that it is cancelled.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.episodes.answers import Failure
from hybridflow.environments.processes.user_errors import returns_awaitable

CANCEL_S = 0.1
"""Seconds in which a call that took too long may clean up."""


@dataclass(frozen=True)
class CallLimits:
    """Seconds of each call of the user's code (None: no limit), and how many run at a time.

    `agent_seconds`: those of a whole episode of an agent.
    """

    seconds: float | None = 60.0
    concurrency: int = 32
    agent_seconds: float | None = 600.0


OwnLimit = tuple[float | None, Callable[[], Awaitable[float]]]
"""The seconds of a call, and what says how many it has waited."""


class FailedError(Exception):
    """A method of the environment has failed."""

    def __init__(self, failure: Failure, error: str) -> None:
        super().__init__(error)
        self.failure: Failure = failure


class LimitedCalls:
    """Calls within `limits`; `slots` bounds those of all objects that share it.

    `num_stuck` counts the calls of this process that were given up but still run.
    """

    num_stuck = 0

    def __init__(self, limits: CallLimits, slots: asyncio.Semaphore | None = None) -> None:
        self.limits, self._slots = limits, slots or asyncio.Semaphore(limits.concurrency)

    async def run(self, what: str, call: Callable[[], Any], own: OwnLimit | None = None) -> Any:
        """Return what a call returns, `async` or not, in a task of its own, which may ignore that it is cancelled.

        A call with a limit of its own takes no slot, and may wait for others: those seconds do not count.
        """
        limit, waited = own or (self.limits.seconds, None)
        async with nullcontext() if own else self._slots:
            task, began = asyncio.ensure_future(_outcome(call)), time.monotonic()
            try:
                await asyncio.wait({task}, timeout=limit)
                while waited and limit and not task.done():
                    left = limit + await waited() - (time.monotonic() - began)
                    if left <= 0:
                        break
                    await asyncio.wait({task}, timeout=left)
            finally:
                is_late = not task.done()
                task.cancel()
            if is_late:
                await asyncio.wait({task}, timeout=CANCEL_S)
                if not task.done():
                    LimitedCalls.num_stuck += 1
                    task.add_done_callback(_one_less_is_stuck)
                limited = f"agent.timeout_s={limit:g}" if own else f"{limit:g} s"
                raise FailedError("timeout", f"{what} took longer than {limited}")
            value, error = task.result()
            if isinstance(error, asyncio.CancelledError):  # by the user's code
                raise FailedError("raised", f"{what} was cancelled: asyncio.CancelledError") from error
            if error is not None:
                raise error
            return value


async def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what a call returns or raises: SystemExit raised in a task would end the event loop."""
    try:
        value = call()
        return (await value if inspect.isawaitable(value) else value), None
    except BaseException as error:  # of the user's code
        return None, error


def _one_less_is_stuck(_: object) -> None:
    LimitedCalls.num_stuck -= 1


async def run_function(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> Any:
    """Return what a function returns; one that is not `async` has a thread, so that others go on if it never ends."""
    if returns_awaitable(function):
        found = function(**arguments)
        return await found if inspect.isawaitable(found) else found
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def run() -> None:
        try:
            value, error = function(**arguments), None
        except BaseException as raised:  # of the user's function
            value, error = None, raised
        with suppress(RuntimeError):  # the loop is closed: the run has ended
            loop.call_soon_threadsafe(_settle, outcome, value, error)

    threading.Thread(target=run, daemon=True, name=name).start()
    try:
        value, error = await outcome
    except asyncio.CancelledError:  # it took too long
        LimitedCalls.num_stuck += 1
        raise
    if error is not None:
        raise error
    return value


def _settle(outcome: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if outcome.done():
        LimitedCalls.num_stuck -= 1
    else:
        outcome.set_result((value, error))
