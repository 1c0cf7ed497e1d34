"""Calls of a reward function in this process: one sample after another, concurrently, or all as a batch."""

import asyncio
import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.rewards.batches import as_batch, split
from hybridflow.rewards.outcome import Outcome
from hybridflow.rewards.reward_process import described, returns_awaitable, takes_batches
from hybridflow.rewards.table import RewardFunction

Samples = Sequence[Mapping[str, Any]]


def call_here(
    function: RewardFunction, samples: Samples, kwargs: Mapping[str, Any], concurrency: int = 32
) -> list[Outcome]:
    """Return the outcome of each sample, in order; an `async` function runs up to `concurrency` samples at a time."""
    if samples and takes_batches(function):
        return split(_call_each(function, [as_batch(samples)], kwargs, 1)[0], len(samples))
    return _call_each(function, samples, kwargs, concurrency)


def _call_each(function: RewardFunction, calls: Samples, kwargs: Mapping[str, Any], concurrency: int) -> list[Outcome]:
    if returns_awaitable(function):
        try:
            return asyncio.run(_call_concurrently(function, calls, kwargs, concurrency))
        except SystemExit as error:  # raised in a task that a call left behind; the call is unknown
            return [_failure(error, function)] * len(calls)
    outcomes = []
    for arguments in calls:
        try:
            outcomes.append(Outcome(function(**copy.deepcopy(dict(arguments)), **kwargs)))
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            outcomes.append(_failure(error, function))
    return outcomes


async def _call_concurrently(
    function: Any, calls: Samples, kwargs: Mapping[str, Any], concurrency: int
) -> list[Outcome]:
    slots = asyncio.Semaphore(concurrency)

    async def call(arguments: Mapping[str, Any]) -> Outcome:
        async with slots:
            try:
                result = function(**copy.deepcopy(dict(arguments)), **kwargs)
                return Outcome(await result if inspect.isawaitable(result) else result)
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                return _failure(error, function)

    return await asyncio.gather(*(call(arguments) for arguments in calls))


def _failure(error: BaseException, function: RewardFunction) -> Outcome:
    return Outcome(None, "raised", described(error, function), error)
