"""The user's side of an episode: where it begins, what answers a turn, and what the episode is worth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybridflow.environments.episodes.messages import Message, ToolCall

EndReason = Literal["done", "turns", "tokens", "seconds", "rows", "error"]
"""Why an episode ended: the environment ended it, a limit did, or an error of the environment."""

METHODS = ("reset", "step", "reward", "group_rewards", "close")
"""Methods of an environment that are not tools."""


@dataclass(frozen=True)
class CalledTool:
    """A call of a turn and its result; `is_error`: the result says what was wrong with the call."""

    call: ToolCall
    result: str
    is_error: bool = False


@dataclass(frozen=True)
class Turn:
    """A turn of the model, counted from 0, with the results of its calls."""

    number: int
    content: str
    reasoning: str = ""
    called: tuple[CalledTool, ...] = ()
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reply:
    """Messages that answer a turn, and a reward for this turn, which is added to that of the whole episode."""

    messages: Sequence[Message] = ()
    reward: float = 0.0


@dataclass(frozen=True)
class Done:
    """Ends an episode. `reward` is that of the last turn, and is added to that of the whole episode."""

    reward: float = 0.0


@dataclass
class Episode:
    """The history of an episode: its data row, messages and turns, and how it ended (None: it is running)."""

    row: Mapping[str, Any]
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ended: EndReason | None = None
    error: str = ""


class Environment:
    """Base class of environments. Public methods besides `METHODS` are tools; they may be `async`.

    One object serves one episode, so it may keep what it needs in its attributes. It must do the same again when it is
    asked the same: if its process is lost, a new object gets all questions of the episode once more.
    """

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Return the first messages of the episode: those of the row's prompt, unless a subclass has others."""
        prompt = row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    async def step(self, turn: Turn) -> Sequence[Message] | Reply | Done:
        """Return the messages that answer a turn, after the results of its tools, a `Reply`, or `Done`.

        Without messages the episode goes on if the turn has called a tool, and ends otherwise: so ends the default.
        """
        return []

    async def reward(self, episode: Episode) -> float | Mapping[str, Any]:
        """Return what the episode is worth: a number, or several by name, of which `score` is learned from."""
        raise NotImplementedError

    async def group_rewards(self, episodes: Sequence[Episode]) -> Sequence[float]:
        """Return a number for each episode of one prompt, which is added to its reward; a new object is asked.

        A class with this method needs no `reward`.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Release what the episode holds. It is called after `reward`, and after an error."""
