"""An environment whose answers take a while, as those of tools over a network, and an agent that does the same."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from hybridflow.environments import AgentSession, Environment, Episode, Reply, Turn

CLIENT = AsyncOpenAI(base_url="http://set.for.each.episode", api_key="set for each episode", timeout=600)


class Waiting(Environment):
    """Answers every turn after `TOOL_SECONDS` of the environment variables."""

    async def step(self, turn: Turn) -> Reply:
        await asyncio.sleep(float(os.environ["TOOL_SECONDS"]))
        return Reply([{"role": "user", "content": f"{turn.number} done"}])

    async def reward(self, episode: Episode) -> float:
        return float(len(episode.turns))


async def waiting(session: AgentSession, row: Mapping[str, Any]) -> float:
    """Ask for `row["turns"]` turns of `row["tokens"]` tokens, each with its answer."""
    return await _play(CLIENT.with_options(base_url=session.base_url, api_key=session.api_key), row)


async def waiting_alone(session: AgentSession, row: Mapping[str, Any]) -> float:
    """Do the same with a client for each episode, which reads the certificates of HTTPS again."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=600) as client:
        return await _play(client, row)


async def _play(client: AsyncOpenAI, row: Mapping[str, Any]) -> float:
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for number in range(row["turns"]):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=row["tokens"])
        await asyncio.sleep(float(os.environ["TOOL_SECONDS"]))
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": f"{number} done"}]
    return float(row["turns"])
