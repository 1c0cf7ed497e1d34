"""Copying and merging of meta_info: every new batch gets a copy; union and concat merge."""

import copy
from collections.abc import Sequence
from typing import Any

from hybridflow.errors import BatchError
from hybridflow.protocol.equality import is_equal

METRICS = "metrics"

NOISE_KEY = "noise_key"
"""Key of `meta_info`: seed, stream and step of the prompts. Those that sample (trainers) set it; workers that generate
draw `Request.noise_key` from it, and workers that score seed rewards with it and name the step by it."""


def copy_structure(value: Any) -> Any:
    """Copy dicts, lists, tuples and sets at any depth; their other contents (arrays, objects) are shared."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = copy_structure(item)
        return copied
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = [copy_structure(item) for item in value]
        return copied
    if type(value) is tuple:
        return tuple(copy_structure(item) for item in value)
    return set(value) if type(value) is set else value


def union_meta_info(mine: dict, theirs: dict) -> dict:
    """Return all keys of both; "metrics" is joined name by name. Raises BatchError for a key with different values."""
    joined = _merge([mine, theirs], "union")
    metrics = [part[METRICS] for part in (mine, theirs) if part.get(METRICS) is not None]
    if metrics:
        joined[METRICS] = metrics[0] if len(metrics) == 1 else _merge(metrics, "union of metrics")
    return joined


def concat_meta_info(parts: Sequence[dict]) -> dict:
    """Return all keys of all parts; "metrics" is aggregated into one list per name, in the order of the parts.

    A metric that only some parts have gets the values of these. Raises BatchError if two parts have different values of
    another key.
    """
    merged = _merge(parts, "concat")
    if any(part.get(METRICS) is not None for part in parts):
        merged[METRICS] = _aggregate([part.get(METRICS) or {} for part in parts])
    return merged


def _merge(parts: Sequence[dict], operation: str) -> dict:
    merged: dict = {}
    for part in parts:
        for key, value in part.items():
            if key == METRICS:
                continue
            if key not in merged:
                merged[key] = value
            elif not is_equal(merged[key], value):
                raise BatchError(
                    f"{operation}: {key!r} is {_short(merged[key])} in one batch and {_short(value)} in another; "
                    'make them equal, drop one, or move values that differ per part to meta_info["metrics"].'
                )
    return merged


def _aggregate(parts: list[dict]) -> dict[str, list]:
    for index, part in enumerate(parts):
        if not isinstance(part, dict):
            raise BatchError(
                f'concat: meta_info["metrics"] of part {index} is a {type(part).__name__}; '
                "it must be a dict from a name to a number or a list."
            )
    aggregated: dict[str, list] = {}
    for part in parts:
        for name, value in part.items():
            aggregated.setdefault(name, []).extend(value if isinstance(value, list | tuple) else [value])
    return aggregated


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
