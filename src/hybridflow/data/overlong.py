"""What happens to a prompt, or to an example, that is longer than the limit."""

from collections.abc import Sequence
from typing import get_args

from hybridflow.config.sections import OverlongName
from hybridflow.errors import DataConfigError
from hybridflow.observability import get_logger

logger = get_logger(__name__)

OVERLONG: tuple[str, ...] = get_args(OverlongName)


def truncate(ids: list[int], max_length: int, side: str) -> list[int]:
    """Cut ids to `max_length` tokens.

    "truncate-left" removes from the start, "truncate-right" from the end, "truncate-middle" keeps half of the limit at
    the start and the rest at the end.
    """
    if len(ids) <= max_length:
        return ids
    if side == "truncate-left":
        return ids[len(ids) - max_length :]
    if side == "truncate-right":
        return ids[:max_length]
    num_start = max_length // 2
    return ids[:num_start] + ids[len(ids) - (max_length - num_start) :]


def require_limits(max_prompt_length: int, max_response_length: int, max_samples: int) -> None:
    """Raise DataError for limits that leave nothing."""
    if max_prompt_length < 1 or max_response_length < 1 or max_samples < 0:
        raise DataConfigError(
            f"max_prompt_length={max_prompt_length} and max_response_length={max_response_length} must be at least "
            f"1, max_samples={max_samples} at least 0."
        )


def short_enough(
    places: Sequence[str],
    lengths: Sequence[tuple[int, int]],
    max_prompt_length: int,
    max_response_length: int,
    what: str,
) -> list[int]:
    """Which examples, of (prompt, response) lengths, are within the limits; says which are not.

    Raises DataError if none is left.
    """
    kept = [
        i
        for i, (prompt_len, response_len) in enumerate(lengths)
        if prompt_len <= max_prompt_length and response_len <= max_response_length
    ]
    if len(kept) == len(lengths):
        return kept
    first = min(set(range(len(lengths))) - set(kept))
    message = (
        f"dropped {len(lengths) - len(kept)} of {len(lengths)} {what} longer than "
        f"max_prompt_length={max_prompt_length} or max_response_length={max_response_length} tokens (the first is "
        f"{places[first]}: prompt {lengths[first][0]}, response {lengths[first][1]} tokens)."
    )
    if not kept:
        raise DataConfigError(f"none of the {what} is left: {message} Raise the limits.")
    logger.warning("%s", message)
    return kept
