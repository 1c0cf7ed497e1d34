"""Environments of other packages that answer an action with an observation and a reward, as texts."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.environments.episodes.environment import Done, Environment, Episode, Reply, Turn
from hybridflow.environments.episodes.messages import Message

NUMBER = r"(?<![\d.])-?\d{1,9}(?!\.?\d)"
"""A whole number in a text, not a part of another one or a longer one than actions have."""


class WrongActionError(ValueError):
    """An action that the environment does not take; the text says what it takes, and the model reads it."""


class SteppingEnvironment(Environment):
    """An environment whose first observation ends the row's prompt; its answer to a turn is the next observation.

    The rewards of steps are added. After a wrong action the episode goes on.
    """

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Return the row's prompt with the first observation."""
        messages, observation = [dict(message) for message in await super().reset(row)], await self._begin(row)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{observation}".strip()
            return messages
        return [*messages, {"role": "user", "content": observation}]

    async def step(self, turn: Turn) -> Reply | Done:
        """Take the action of a turn."""
        try:
            observation, reward, is_over = await self._act(turn.content)
        except WrongActionError as wrong:
            return Reply([{"role": "user", "content": str(wrong)}])
        return Done(reward) if is_over else Reply([{"role": "user", "content": observation}], reward)

    async def reward(self, episode: Episode) -> float:
        """Return 0: the rewards of steps are all that the episode is worth."""
        return 0.0

    async def _begin(self, row: Mapping[str, Any]) -> str:
        """Begin the episode of a row and return the first observation."""
        raise NotImplementedError

    async def _act(self, text: str) -> tuple[str, float, bool]:
        """Return observation, reward and whether the episode is over. Raises WrongActionError."""
        raise NotImplementedError


def seed_of(row: Mapping[str, Any]) -> int | None:
    """Return the seed of a row: `extra_info.seed`, its index, or a ground truth that is a whole number."""
    extra = row.get("extra_info") or {}
    texts = [str(value) for value in (extra.get("seed"), extra.get("index"), row.get("ground_truth"))]
    return next((int(text) for text in texts if re.fullmatch(r"\d+", text)), None)
