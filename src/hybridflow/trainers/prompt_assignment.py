"""The assignment of prompts to rollout engines by the keys and values that they are expected to need."""

from collections.abc import Sequence

import numpy as np

from hybridflow.algorithms import proportional_partition

FAMILY_SHARE = 0.5
"""Share of the longer of two prompts that must be their common prefix, so that they are of one family."""

LARGEST_FAMILY = 0.25
"""Largest load of a family that is assigned as a whole, as a share of an engine's fair load.

A larger one, such as all prompts with one instruction, is assigned prompt by prompt, or long responses would crowd.
"""

FAMILY_SLACK = 0.05
"""Share by which the load of the busiest engine may grow so that families stay together."""


def expected_tokens(prompt_lengths: np.ndarray, response_lengths: np.ndarray, group_size: int) -> np.ndarray:
    """Return the tokens (prompts,) of keys and values that each prompt's group needs when its responses end.

    prompt_lengths, response_lengths: (prompts,) in tokens.
    """
    return group_size * (prompt_lengths + response_lengths)


def prefix_families(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of each prompt's family: prompts whose neighbor in sorted order has a long common prefix.

    A common prefix is long if it is at least FAMILY_SHARE of the longer prompt.
    """
    families, family, before = [0] * len(prompts), -1, None
    for index in sorted(range(len(prompts)), key=lambda index: tuple(prompts[index])):
        own = prompts[index]
        if before is None or _common_prefix(before, own) < FAMILY_SHARE * max(len(before), len(own)):
            family += 1
        families[index], before = family, own
    return families


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def assign_prompts(costs: Sequence[float], families: Sequence[int], capacities: Sequence[float]) -> list[list[int]]:
    """Return the prompts of each engine, the costliest first; each prompt once, and no engine without one.

    Small families are assigned as a whole, unless the busiest engine would then have FAMILY_SLACK more than with single
    prompts. costs: > 0. capacities: > 0, proportional to the load that an engine should get; at most as many as
    there are prompts.
    """
    singles = _assign([[prompt] for prompt in range(len(costs))], costs, capacities)
    whole = _assign(_units(costs, families, LARGEST_FAMILY * sum(costs) / len(capacities)), costs, capacities)
    slack = 1 + FAMILY_SLACK
    fits = all(whole) and _busiest(whole, costs, capacities) <= slack * _busiest(singles, costs, capacities)
    assigned = [sorted(rows, key=lambda row: (-costs[row], row)) for rows in (whole if fits else singles)]
    for empty in (rows for rows in assigned if not rows):  # an engine of tiny capacity
        empty.append(max(assigned, key=len).pop())
    return assigned


def _units(costs: Sequence[float], families: Sequence[int], largest: float) -> list[list[int]]:
    """Return the prompts of each family that is not larger, and each prompt of the others by itself."""
    members: dict[int, list[int]] = {}
    for prompt, family in enumerate(families):
        members.setdefault(family, []).append(prompt)
    units: list[list[int]] = []
    for family in members.values():
        is_small = sum(costs[prompt] for prompt in family) <= largest
        units += [family] if is_small else [[prompt] for prompt in family]
    return units


def _assign(units: Sequence[list[int]], costs: Sequence[float], capacities: Sequence[float]) -> list[list[int]]:
    """Return the prompts of each engine, unit by unit."""
    engines = proportional_partition([sum(costs[row] for row in unit) for unit in units], capacities)
    return [[row for unit in of_engine for row in units[unit]] for of_engine in engines]


def _busiest(assigned: Sequence[Sequence[int]], costs: Sequence[float], capacities: Sequence[float]) -> float:
    """Return the largest load of an engine, relative to its capacity."""
    pairs = zip(assigned, capacities, strict=True)
    return max(sum(costs[row] for row in rows) / capacity for rows, capacity in pairs)
