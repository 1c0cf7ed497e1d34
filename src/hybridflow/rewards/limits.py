"""Limits that a recipe gives a reward function: a wrong one is an error, and not a zero for every response."""

from typing import Any

from hybridflow.errors import RewardError

MAX_SECONDS = 86_400.0


def require_seconds(name: str, value: Any) -> None:
    """Raises `RewardError` unless it is more than 0, and at most a day."""
    if not _is_number(value) or not 0 < value <= MAX_SECONDS:
        raise RewardError(f"{name}={value!r} must be more than 0 seconds, and at most {MAX_SECONDS:g}.")


def require_whole(name: str, value: Any, *, least: int) -> None:
    """Raises `RewardError` unless it is a whole number that is not below the least."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RewardError(f"{name}={value!r} must be a whole number, {least} or more.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
