"""Calls of a reward function in this process: one sample after another, concurrently, or all as a batch."""

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hybridflow.environments.processes.arguments import Called, LoadedReward, as_batch
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
    reward = LoadedReward(function, kwargs)
    if samples and reward.kind.takes_batches:
        return split(_call_each(reward, [as_batch(samples)], 1)[0], len(samples))
    return _call_each(reward, samples, concurrency)


def _call_each(reward: LoadedReward, calls: Samples, concurrency: int) -> list[Outcome]:
    owner = os.getpid()
    with Interrupts() as interrupts:

        def outcome_of(called: Called) -> Outcome:
            message, error = called
            if error is not None:
                interrupts.raise_if_one(error)
            note_progress()
            return replace(Outcome.of_message(message), cause=error)

        async def call_concurrently() -> list[Outcome]:
            slots = asyncio.Semaphore(concurrency)

            async def call(arguments: Mapping[str, Any]) -> Outcome:
                async with slots:
                    return outcome_of(await reward.call_async(arguments))

            return await asyncio.gather(*map(call, calls))

        if reward.kind.is_async:
            try:
                return _run(call_concurrently())
            except (SystemExit, KeyboardInterrupt) as error:  # raised in a task that a call left behind
                return [outcome_of((reward.failure(error), error)) for _ in calls]  # the call is unknown
        outcomes = []
        for arguments in calls:
            outcomes.append(outcome_of(reward.call(arguments)))
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
