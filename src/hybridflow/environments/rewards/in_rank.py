"""Calls of a reward function in this process: one sample after another, concurrently, or all as a batch."""

import asyncio
import copy
import inspect
import os
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hybridflow.environments.processes.arguments import arguments_of, as_batch, takes_batches
from hybridflow.environments.processes.reward_process import as_message, described, returns_awaitable
from hybridflow.environments.rewards.outcome import Outcome, split
from hybridflow.environments.rewards.table import RewardFunction
from hybridflow.runtime.progress import note_progress
from hybridflow.runtime.user_import import Interrupts

Samples = Sequence[Mapping[str, Any]]


def call_here(
    function: RewardFunction, samples: Samples, kwargs: Mapping[str, Any], concurrency: int = 32
) -> list[Outcome]:
    """Return the outcome of each sample, in order; an `async` function runs up to `concurrency` samples at a time.

    Anything that the function raises is its failure, except the KeyboardInterrupt of a signal to this process.
    """
    if samples and takes_batches(function):
        return split(_call_each(function, [as_batch(samples)], kwargs, 1)[0], len(samples))
    return _call_each(function, samples, kwargs, concurrency)


def _call_each(function: RewardFunction, calls: Samples, kwargs: Mapping[str, Any], concurrency: int) -> list[Outcome]:
    owner = os.getpid()
    with Interrupts() as interrupts:
        if returns_awaitable(function):
            try:
                return _run(_call_concurrently(function, calls, kwargs, concurrency, interrupts))
            except (SystemExit, KeyboardInterrupt) as error:  # raised in a task that a call left behind
                interrupts.raise_if_one(error)
                return [_failure(error, function)] * len(calls)  # the call is unknown
        outcomes = []
        for arguments in calls:
            try:
                outcomes.append(_outcome(function(**arguments_of(function, copy.deepcopy(dict(arguments)), kwargs))))
            except BaseException as error:  # a user's function may raise anything
                interrupts.raise_if_one(error)
                outcomes.append(_failure(error, function))
            note_progress()
            if os.getpid() != owner:  # a child that the function has forked must not go on as this rank
                os._exit(0)
    return outcomes


def _run(coroutine: Coroutine[Any, Any, list[Outcome]]) -> list[Outcome]:
    """Run a coroutine to its end; in another thread if this one has an event loop that runs, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def _call_concurrently(
    function: Any, calls: Samples, kwargs: Mapping[str, Any], concurrency: int, interrupts: Interrupts
) -> list[Outcome]:
    slots = asyncio.Semaphore(concurrency)

    async def call(arguments: Mapping[str, Any]) -> Outcome:
        async with slots:
            try:
                result = function(**arguments_of(function, copy.deepcopy(dict(arguments)), kwargs))
                return _outcome(await result if inspect.isawaitable(result) else result)
            except BaseException as error:
                interrupts.raise_if_one(error)
                return _failure(error, function)
            finally:
                note_progress()

    return await asyncio.gather(*(call(arguments) for arguments in calls))


def _outcome(result: Any) -> Outcome:
    """Return the result as a reward process would send it: plain values, on which no method of the user is called."""
    return Outcome.of_message(as_message(result))


def _failure(error: BaseException, function: RewardFunction) -> Outcome:
    return Outcome(None, "raised", described(error, function), error)
