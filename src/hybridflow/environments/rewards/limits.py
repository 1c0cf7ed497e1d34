"""Checks of numbers that a recipe passes to a reward function: a wrong one is an error, not a score of 0."""

import math
from typing import Any

from hybridflow.errors import RewardError

MAX_SECONDS = 86_400.0


def require_seconds(name: str, value: Any) -> None:
    """Raise `RewardError` unless the value is above 0 and at most a day."""
    if not is_number(value) or not 0 < value <= MAX_SECONDS:
        raise RewardError(f"{name}={value!r} must be more than 0 seconds, and at most {MAX_SECONDS:g}.")


def require_number(name: str, value: Any, *, least: float = -math.inf) -> None:
    """Raise `RewardError` unless the value is a finite number of at least `least`."""
    if not is_number(value) or not math.isfinite(value) or value < least:
        bound = "" if math.isinf(least) else f", {least:g} or more"
        raise RewardError(f"{name}={value!r} must be a finite number{bound}.")


def require_whole(name: str, value: Any, *, least: int) -> None:
    """Raise `RewardError` unless the value is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RewardError(f"{name}={value!r} must be a whole number, {least} or more.")


def is_number(value: Any) -> bool:
    """Return whether the value is a number; True and "5" are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
