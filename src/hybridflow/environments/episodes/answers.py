"""What an episode asks of its environment, and what comes back: plain values, which a process or a journal can hold."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hybridflow.environments.episodes.environment import CalledTool, EndReason, Episode
from hybridflow.environments.episodes.messages import AssistantTurn, Message

Failure = Literal["raised", "timeout", "memory", "died"]
"""Kinds of failures of an environment, named as those of reward functions."""


@dataclass(frozen=True)
class Begin:
    """Begin an episode with a row of the data."""

    row: Mapping[str, Any]


@dataclass(frozen=True)
class TakeTurn:
    """Call the tools of a turn of the model, and answer it."""

    said: AssistantTurn


@dataclass(frozen=True)
class RunAgent:
    """Run an agent on a row of the data, with the endpoint at `base_url` and its key."""

    row: Mapping[str, Any]
    base_url: str
    api_key: str


@dataclass(frozen=True)
class Finish:
    """Say what the episode is worth, and release it. `cut_turn`: the last turn, which a limit has cut.

    `episode`: that of an agent, whose turns its object has not seen. `rewards`: what it is worth, if that is known.
    """

    ended: EndReason
    cut_turn: AssistantTurn | None = None
    episode: Episode | None = None
    rewards: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ScoreGroup:
    """Say what each episode of one prompt is worth beside the others."""

    episodes: Sequence[Episode]


Question = Begin | TakeTurn | RunAgent | Finish | ScoreGroup


@dataclass(frozen=True)
class Answer:
    """New messages, results of tools, whether the episode has ended, and rewards; or how the environment failed.

    `reward` is that of the turn, `rewards` (of `Finish`) what the episode is worth by name, `group` that of
    `ScoreGroup`. `is_late`: the episode has taken longer than it may. `output`: what a command has printed.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    messages: tuple[Message, ...] = ()
    called: tuple[CalledTool, ...] = ()
    is_done: bool = False
    reward: float = 0.0
    rewards: Mapping[str, Any] | None = None
    group: tuple[float, ...] = ()
    is_late: bool = False
    failure: Failure | None = None
    error: str = ""
    output: str = ""

    def to_message(self) -> dict[str, Any]:
        """Return the answer as values of JSON."""
        return asdict(self)

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "Answer":
        """Return the answer that `to_message` has written. Raises ValueError for another message."""
        try:
            return _ANSWER.validate_python(message)
        except ValidationError as error:
            problem = "; ".join(f"{each['loc']}: {each['msg']}" for each in error.errors()[:3])
            raise ValueError(f"{str(message)[:200]} is not an answer of an environment: {problem}") from error


_ANSWER = TypeAdapter(Answer)


MOST_REWARD = 1e300
"""Rewards are between this and its negative; an integer may be larger than any float."""


def rewards_of(found: object) -> dict[str, Any]:
    """Return rewards by name, numbers and texts, of a number or a mapping. Raises ValueError for other values."""
    given = found if isinstance(found, Mapping) else {"score": found}
    if not given:
        raise ValueError("no values; expected a finite number, or several by name")
    rewards: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, str) and name != "score":
            rewards[as_unicode(str(name))] = as_unicode(value)
        elif isinstance(value, numbers.Real) and bool(abs(value) < MOST_REWARD):  # pyright: ignore[reportOperatorIssue]
            rewards[as_unicode(str(name))] = float(value)
        else:
            raise ValueError(f"{name}={value!r:.100}; expected a finite number, or several by name")
    return rewards


def as_unicode(text: str) -> str:
    """Return a text without halves of characters, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
