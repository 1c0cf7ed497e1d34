"""Rows dealt out to ranks: hybridflow's `balanced_partition` against verl's `get_seqlen_balanced_partitions`, on CPU.

Lengths are drawn from a long-tailed distribution (log-normal, median 665 tokens, clipped to 16 .. 16,384), anew in each
round. Both sides get the same list of numbers and return lists of indices; the time is that of the call. Every
partition is checked to hold each row once, and as many rows in each part where that is asked for.

  time, imbalance             8,192 rows over 64 ranks, as many on each: how training deals them out
  time_free, imbalance_free   the same, any number on each: how micro-batches are filled
  imbalance_others            the worst of 90 other cases of fewer rows and ranks, other distributions

An imbalance is the heaviest part above the mean. Its ratio compares the heaviest parts: the peer's over ours, in the
round that was worst for us; 1 or more is never worse. Half a minute.
"""

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from support.arguments import parser_of
from support.environments import ENVIRONMENTS, python_of
from support.errors import BenchmarkError
from support.report import Row, figure, print_rows, print_sides, print_table
from support.side import Side

from hybridflow.algorithms import imbalance
from hybridflow.engines.micro_batches import plan_micro_batches
from hybridflow.models import DecoderShape, sequence_costs

OURS, PEER = "hybridflow", "verl"
MAKE_TARGET = "bench-balance"
NUM_ROWS, NUM_RANKS = 8192, 64
CALLS = {True: 9, False: 1}
"""Timed calls in a round, by whether counts are equal: the peer's other way takes seconds."""
SHAPE = DecoderShape(24, 896, 4864, 14, 2, 151936)
"""Of the modelled step: Qwen2.5-0.5B."""
BUDGET = 16384

ENVIRONMENTS[PEER] = ".bench/verl"


def main() -> None:
    args = parser_of(__doc__).parse_args()
    python_of(PEER, MAKE_TARGET)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides = [
            stack.enter_context(
                Side(system, "int64", task="balance", threads=1, directory=Path(directory), make_target=MAKE_TARGET)
            )
            for system in (OURS, PEER)
        ]
        print_sides(sides, 1)
        rows: list[Row] = []
        for equal, suffix in ((True, ""), (False, "_free")):
            results = [compare(sides, long_tailed(seed), NUM_RANKS, equal) for seed in range(args.repeats)]
            rows += rows_of(results, suffix)
        others = [compare(sides, *case, repeats=1) for case in other_cases()]
        rows.append(rows_of(others, "_others")[1])
        print_step(compare(sides, sequence_costs(SHAPE, long_tailed(0)), NUM_RANKS, True))
    print_padding()
    print_rows("balance", rows)


def long_tailed(seed: int, count: int = NUM_ROWS) -> list[int]:
    """Lengths in tokens."""
    return np.random.default_rng(seed).lognormal(6.5, 1.0, count).clip(16, 16384).astype(int).tolist()


def other_cases() -> list[tuple[list[int], int, bool]]:
    """(lengths, parts, equal counts): few rows, few parts, narrow and two-valued distributions."""
    cases = []
    for (count, parts), equal, seed in product(
        ((16, 4), (64, 8), (256, 8), (512, 16), (1024, 32)), (True, False), range(3)
    ):
        generator = np.random.default_rng(seed)
        uniform = generator.integers(1, 2048, count).tolist()
        two = generator.choice([100, 4000], count).tolist()
        cases += [(lengths, parts, equal) for lengths in (long_tailed(seed, count), uniform, two)]
    return cases


def compare(sides: Sequence[Side], costs: Sequence[float], parts: int, equal: bool, repeats: int = 0) -> dict[str, Any]:
    """Seconds, imbalance and heaviest part of each side on the same costs."""
    result: dict[str, Any] = {}
    costs = [round(cost) for cost in costs]
    for side in sides:
        reply = side.ask(costs=costs, parts=parts, equal=equal, repeats=repeats or CALLS[equal])
        partition = reply["partition"]
        require_partition(side.system, partition, len(costs), parts, equal)
        sums = [sum(costs[row] for row in part) for part in partition]
        result[side.system] = {
            "seconds": reply["seconds"],
            "imbalance": imbalance(costs, partition),
            "heaviest": max(sums),
        }
    size = len(costs) // parts
    result["as_they_come"] = max(sum(costs[i * size : (i + 1) * size]) for i in range(parts))
    result["mean"] = sum(costs) / parts
    return result


def require_partition(system: str, partition: list[list[int]], count: int, parts: int, equal: bool) -> None:
    """BenchmarkError unless every row is in one part, and parts have as many rows if asked."""
    sizes = [len(part) for part in partition]
    if sorted(row for part in partition for row in part) != list(range(count)) or len(partition) != parts:
        raise BenchmarkError(f"{system}'s partition of {count} rows in {parts} does not hold each row once.")
    if equal and max(sizes) - min(sizes) > 0:
        raise BenchmarkError(f"{system}'s parts have from {min(sizes)} to {max(sizes)} rows; they were to be equal.")


def rows_of(results: Sequence[dict[str, Any]], suffix: str) -> list[Row]:
    """The figures of several rounds."""
    ours, peer = ([result[system] for result in results] for system in (OURS, PEER))
    seconds, peer_seconds = (median(reply["seconds"] for reply in replies) for replies in (ours, peer))
    worst = min(theirs["heaviest"] / mine["heaviest"] for mine, theirs in zip(ours, peer, strict=True))
    uneven, peer_uneven = (max(reply["imbalance"] for reply in replies) for replies in (ours, peer))
    return [
        Row(f"time{suffix}", "s", seconds, peer_seconds, ratio=peer_seconds / seconds),
        Row(f"imbalance{suffix}", "1", uneven, peer_uneven, ratio=worst),
    ]


def print_step(result: dict[str, Any]) -> None:
    """The modelled time of a step: its slowest rank's FLOPs."""
    mean = result["mean"]
    lines = [
        (name, figure(heaviest / 1e12), f"{heaviest / mean - 1:.3%}")
        for name, heaviest in (
            ("rows as they come", result["as_they_come"]),
            (f"dealt out by {PEER}", result[PEER]["heaviest"]),
            (f"dealt out by {OURS}", result[OURS]["heaviest"]),
            ("no imbalance", mean),
        )
    ]
    title = f"modelled step of Qwen2.5-0.5B, {NUM_ROWS:,} rows over {NUM_RANKS} ranks: its slowest rank"
    print_table(title, ("", "forward TFLOP", "above the mean"), lines)


def print_padding() -> None:
    """What padding costs, in micro-batches of one rank's rows."""
    lengths = torch.tensor(long_tailed(0, NUM_ROWS // NUM_RANKS))
    lines = []
    for name, packing in (("packed", True), ("padded", False)):
        plan = plan_micro_batches(lengths, BUDGET, packing=packing)
        computed = int(lengths.sum()) if packing else sum(len(part) * int(lengths[part].max()) for part in plan)
        lines.append((name, f"{len(plan)}", f"{1 - int(lengths.sum()) / computed:.1%}"))
    title = f"{len(lengths)} rows of one rank in micro-batches of {BUDGET:,} tokens, similar lengths together"
    print_table(title, ("", "micro-batches", "padding computed"), lines)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
