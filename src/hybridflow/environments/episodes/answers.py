"""What an episode asks of its environment, and what comes back: plain values, which a process or a journal can hold."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hybridflow.environments.episodes.environment import CalledTool, EndReason, Episode
from hybridflow.environments.episodes.messages import AssistantTurn, Message, ToolCall

Failure = Literal["raised", "timeout", "memory", "died"]
"""How an environment has failed; the words are those of reward functions."""


@dataclass(frozen=True)
class Begin:
    """Begin an episode with a row of the data."""

    row: Mapping[str, Any]


@dataclass(frozen=True)
class TakeTurn:
    """Call the tools of a turn of the model, and answer it."""

    said: AssistantTurn


@dataclass(frozen=True)
class Finish:
    """Say what the episode is worth, and release it. `cut_turn`: the last turn, which a limit has cut."""

    ended: EndReason
    cut_turn: AssistantTurn | None = None


@dataclass(frozen=True)
class ScoreGroup:
    """Say what each episode of one prompt is worth beside the others."""

    episodes: Sequence[Episode]


Question = Begin | TakeTurn | Finish | ScoreGroup


@dataclass(frozen=True)
class Answer:
    """New messages, results of tools, whether the episode has ended, and rewards; or how the environment failed.

    `reward` is that of the turn, `rewards` (of `Finish`) what the episode is worth by name, `group` that of
    `ScoreGroup`. `is_late`: the episode has taken longer than it may.
    """

    messages: tuple[Message, ...] = ()
    called: tuple[CalledTool, ...] = ()
    is_done: bool = False
    reward: float = 0.0
    rewards: Mapping[str, Any] | None = None
    group: tuple[float, ...] = ()
    is_late: bool = False
    failure: Failure | None = None
    error: str = ""

    def to_message(self) -> dict[str, Any]:
        """Return the answer as values of JSON."""
        return asdict(self)

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "Answer":
        """Return the answer that `to_message` has written. Raises ValueError for another message."""
        try:
            called = [
                CalledTool(ToolCall(**each["call"]), str(each["result"]), bool(each["is_error"]))
                for each in message["called"]
            ]
            return cls(
                messages=tuple(dict(each) for each in message["messages"]),
                called=tuple(called),
                is_done=bool(message["is_done"]),
                reward=float(message["reward"]),
                rewards=None if message["rewards"] is None else dict(message["rewards"]),
                group=tuple(map(float, message["group"])),
                is_late=bool(message["is_late"]),
                failure=message["failure"],
                error=str(message["error"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(message)[:200]} is not an answer of an environment: {error}") from error
