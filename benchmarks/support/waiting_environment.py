"""An environment whose answers take a while, as those of tools over a network."""

import asyncio
import os

from hybridflow.environments import Environment, Episode, Reply, Turn


class Waiting(Environment):
    """Answers every turn after `TOOL_SECONDS` of the environment variables."""

    async def step(self, turn: Turn) -> Reply:
        await asyncio.sleep(float(os.environ["TOOL_SECONDS"]))
        return Reply([{"role": "user", "content": f"{turn.number} done"}])

    async def reward(self, episode: Episode) -> float:
        return float(len(episode.turns))
