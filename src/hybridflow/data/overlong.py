"""Treatment of prompts that are longer than the limit."""

from typing import get_args

from hybridflow.config.sections.data import OverlongName

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
