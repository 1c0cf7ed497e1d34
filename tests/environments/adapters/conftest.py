"""Episodes of environments of other packages, played by a pool as runs do."""

import asyncio

import pytest

from hybridflow.environments import AssistantTurn, CallLimits, EnvironmentPool, EpisodeClient, ToolCall
from hybridflow.environments.episodes.answers import Begin, Finish, TakeTurn


@pytest.fixture
def play():
    """Return `play(source, row, turns)`: the answers to a row, to turns (texts, or lists of calls) and to their end.

    `judge` is reward.function.
    """
    pools = {}

    def play(source, row, turns, processes=0, judge=""):
        if (source, processes) not in pools:
            settings = {"num_processes": processes, "limits": CallLimits(60.0), "reward_function": judge}
            pools[source, processes] = EnvironmentPool({"it": source}, **settings)
        pool = pools[source, processes]
        said = [
            AssistantTurn(turn) if isinstance(turn, str) else AssistantTurn("", calls=tuple(ToolCall(*c) for c in turn))
            for turn in turns
        ]
        row = {**row, "ground_truth": row.get("reward_model", {}).get("ground_truth", "")}

        async def answers():
            client = EpisodeClient(pool.environment("it", 0))
            return [await client(question) for question in (Begin(row), *map(TakeTurn, said), Finish("done"))]

        return asyncio.run_coroutine_threadsafe(answers(), pool.loop).result(120)

    yield play
    for pool in pools.values():
        pool.close()
