"""Outcome of calling a reward function on a sample, and its JSON form."""

import numbers
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

FailureKind = Literal["raised", "timeout", "memory", "died"]


@dataclass(frozen=True)
class Outcome:
    """The result of the function, or the kind and the text of its failure."""

    result: Any = None
    kind: FailureKind | None = None
    problem: str = ""
    cause: BaseException | None = None
    """The exception, if it was raised in this process."""

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "Outcome":
        """Build the outcome from the message of a reward process; raise ValueError for another message."""
        kind, problem = message.get("kind"), message.get("error", "")
        if kind not in (None, *get_args(FailureKind)):
            raise ValueError(f"kind={kind!r:.100} is not one of {', '.join(get_args(FailureKind))}")
        if not isinstance(problem, str):
            raise ValueError(f"error={problem!r:.100} is not a text")
        return cls(_result(message), kind, problem)

    def to_message(self) -> dict[str, Any]:
        """Return a JSON-compatible message that `of_message` reads."""
        if self.kind is not None:
            return {"kind": self.kind, "error": self.problem}
        return as_message(self.result)


OnOutcome = Callable[[int, "Outcome"], None]
"""Callback that gets the number of a sample and its outcome as soon as it is known."""


class _Representation:
    """Stand-in for a returned value that is neither a number nor a text; only its `repr` was sent."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def as_message(result: Any, *, inside: bool = False) -> dict[str, Any]:
    """Convert a function's result to JSON-compatible form: a number, a text, a mapping of them, or a list."""
    if isinstance(result, Mapping):
        return {"mapping": {str(name): _as_plain(value) for name, value in result.items()}}
    is_array = type(result).__name__ in ("ndarray", "Tensor") and getattr(result, "ndim", 0) == 1
    if not inside and (isinstance(result, list | tuple) or is_array):
        return {"list": [as_message(item, inside=True) for item in result]}
    return {"result": _as_plain(result)}


def _as_plain(value: Any) -> Any:
    """Return numbers and texts unchanged, other values as their representation: {"shown": "<object ...>"}."""
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, numbers.Integral) and abs(int(value)) < 10**300:
        return int(value)
    is_tensor = type(value).__name__ == "Tensor" and getattr(value, "ndim", 1) == 0
    if isinstance(value, numbers.Real) or type(value).__name__ in ("bool_", "bool") or is_tensor:
        with suppress(OverflowError):
            return float(value)
    return {"shown": repr(value)[:400]}


def _result(message: Any) -> Any:
    if not isinstance(message, dict):
        raise ValueError(f"{message!r:.100} is not a result")
    items, values = message.get("list", []), message.get("mapping", {})
    if not isinstance(items, list) or not isinstance(values, dict):
        raise ValueError(f"{message!r:.100} is not a result")
    if "list" in message:
        return [_result(item) for item in items]
    if "mapping" in message:
        return {name: _value(plain) for name, plain in values.items()}
    return _value(message.get("result"))


def _value(plain: Any) -> Any:
    if isinstance(plain, dict) and isinstance(plain.get("shown"), str):
        return _Representation(plain["shown"])
    if isinstance(plain, dict | list):
        raise ValueError(f"{plain!r:.100} is not a value")
    return plain


def split(outcome: Outcome, num_samples: int) -> list[Outcome]:
    """Return the outcome of each sample; if the batch failed, each sample gets its failure."""
    result = outcome.result
    if outcome.kind is not None:
        return [outcome] * num_samples
    if not isinstance(result, list) or len(result) != num_samples:
        found = f"{len(result)} results" if isinstance(result, list) else f"{result!r:.100}"
        problem = f"ValueError: a batch function must return a list of {num_samples} results, one for each sample"
        return [Outcome(None, "raised", f"{problem}, not {found}")] * num_samples
    return [Outcome(item) for item in result]
