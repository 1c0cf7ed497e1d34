"""The order of measurements: sides alternate, so that a slow minute of the machine affects all of them."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from support.other_work import OtherWork
from support.side import Side

SETTLING_S = 0.4
"""Pause before each measurement: idle threads of the previous side may still spin for 0.2 s."""

MUCH_OTHER_WORK = 0.05
"""The share of the machine above which other programs are reported.

The threads of a side wait for each other, so that a small share of others costs it a multiple.
"""

Measurements = dict[Side, list[dict[str, Any]]]


def alternate(
    sides: Sequence[Side], measure: Callable[[Side, int], dict[str, Any]], repeats: int, label: str
) -> Measurements:
    """Call `measure(side, round)` for each side in each round, every second round in reverse: a, b, b, a, a, b, ...

    Round 0 is the warm-up, whose results are not returned. Warns if other programs were running.
    """
    disturbed = 0
    results: Measurements = {side: [] for side in sides}
    for number in range(repeats + 1):
        for side in sides if number % 2 else reversed(sides):
            time.sleep(SETTLING_S)
            with OtherWork(side.process_id) as other:
                result = measure(side, number)
            much = other.share > MUCH_OTHER_WORK
            kind = f"round {number}/{repeats}" if number else "warm-up"
            note = f"; other programs used {other.share:.0%} of the machine" if much else ""
            print(f"{label}, {kind}: {side.name} {result['seconds']:.3f} s{note}", file=sys.stderr, flush=True)
            if number:
                results[side].append(result)
                disturbed += much
    if disturbed:
        print(
            f"\nwarning: other programs were running in {disturbed} of {len(sides) * repeats} measurements of {label}; "
            "its figures are not valid; run it again on an idle machine.",
            flush=True,
        )
    return results
