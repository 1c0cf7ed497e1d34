"""What came of calling a reward function on a sample, and how it is written down."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.rewards.reward_process import told

FailureKind = Literal["raised", "timeout", "memory", "died"]


@dataclass(frozen=True)
class Outcome:
    """What the function returned, or what kind of failure there was and its text."""

    result: Any = None
    kind: FailureKind | None = None
    problem: str = ""
    cause: BaseException | None = None
    """The exception itself, where it was raised in this process."""

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "Outcome":
        """Of what a process answered."""
        return cls(_result(message), message.get("kind"), message.get("error", ""))

    def to_message(self) -> dict[str, Any]:
        """What `of_message` reads, as JSON can hold it."""
        if self.kind is not None:
            return {"kind": self.kind, "error": self.problem}
        return told(self.result)


Heard = Callable[[int, "Outcome"], None]
"""Told the number of a sample and its outcome as soon as that is known."""


@dataclass
class Outcomes:
    """Those known by now."""

    known: list[Outcome | None]
    heard: Heard | None = None

    def tell(self, number: int, outcome: Outcome) -> None:
        self.known[number] = outcome
        if self.heard:
            self.heard(number, outcome)


class _Shown:
    """What a function returned that is neither a number nor a text: how it looks is all that came."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _result(message: Mapping[str, Any]) -> Any:
    def value(plain: Any) -> Any:
        return _Shown(plain["shown"]) if isinstance(plain, Mapping) else plain

    if "list" in message:
        return [_result(item) for item in message["list"]]
    if "mapping" in message:
        return {name: value(plain) for name, plain in message["mapping"].items()}
    return value(message.get("result"))
