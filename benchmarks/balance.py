"""Rows assigned to ranks on CPU: hybridflow's `balanced_partition` against verl's `get_seqlen_balanced_partitions`.

Each round draws new lengths from a long-tailed distribution (log-normal, median 665 tokens, clipped to 16 .. 16,384).
Both sides get the same list of numbers and return lists of indices; the call is timed. Every partition is checked: each
row is in one part, and parts have equal counts if requested.

  time, imbalance             8,192 rows over 64 ranks, equal counts: how training assigns rows to ranks
  time_free, imbalance_free   the same with any counts: how micro-batches are filled
  imbalance_others            the worst of 90 other cases with fewer rows and ranks, and other distributions

The imbalance is the heaviest part relative to the mean, minus 1. Its ratio compares the heaviest parts, verl's over
ours, in the round that was worst for us; it is at least 1 if ours is never worse. Takes half a minute.
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
from support.environments import python_of
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, figure, print_rows, print_sides, print_table
from support.side import Side

from hybridflow.algorithms import imbalance
from hybridflow.engines.micro_batches import plan_micro_batches
from hybridflow.models.model_sizes import DecoderShape, sequence_costs

OURS, PEER = "hybridflow", "verl"
MAKE_TARGET = "bench-balance"
NUM_ROWS, NUM_RANKS = 8192, 64
CALLS = {True: 9, False: 1}
"""Timed calls in a round, by whether counts must be equal: without that, verl's call takes seconds."""
SHAPE = DecoderShape(24, 896, 4864, 14, 2, 151936)
"""The model of the modeled step: Qwen2.5-0.5B."""
BUDGET = 16384
"""Tokens of a micro-batch."""


def main() -> None:
    args = parser_of(__doc__, smoke={"repeats": 1}).parse_args()
    systems = (OURS,) if args.smoke else (OURS, PEER)
    python_of(systems[-1], MAKE_TARGET)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides = [
            stack.enter_context(
                Side(system, "int64", task="balance", threads=1, directory=Path(directory), make_target=MAKE_TARGET)
            )
            for system in systems
        ]
        print_sides(sides, 1)
        rows: list[Row] = []
        for equal, suffix in ((True, ""), (False, "_free")):
            results = [compare(sides, long_tailed(seed), NUM_RANKS, equal) for seed in range(args.repeats)]
            rows += rows_of(results, suffix)
        others = [compare(sides, *case, repeats=1) for case in other_cases()[:: 30 if args.smoke else 1]]
        rows.append(rows_of(others, "_others")[1])
        print_step(compare(sides, sequence_costs(SHAPE, long_tailed(0)), NUM_RANKS, True))
    print_padding()
    print_rows("balance", rows, smoke=args.smoke)


def long_tailed(seed: int, count: int = NUM_ROWS) -> list[int]:
    """Draw lengths in tokens."""
    return np.random.default_rng(seed).lognormal(6.5, 1.0, count).clip(16, 16384).astype(int).tolist()


def other_cases() -> list[tuple[list[int], int, bool]]:
    """Return cases (lengths, parts, equal counts): few rows, few parts, narrow and two-valued distributions."""
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
    """Return seconds, imbalance and heaviest part of each side on the same costs."""
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
    result["in_order"] = max(sum(costs[i * size : (i + 1) * size]) for i in range(parts))
    result["mean"] = sum(costs) / parts
    return result


def require_partition(system: str, partition: list[list[int]], count: int, parts: int, equal: bool) -> None:
    """Raise BenchmarkError unless every row is in one part, and parts have equal counts if requested."""
    sizes = [len(part) for part in partition]
    if sorted(row for part in partition for row in part) != list(range(count)) or len(partition) != parts:
        raise BenchmarkError(f"{system}'s partition of {count} rows into {parts} parts does not have each row once.")
    if equal and max(sizes) - min(sizes) > 0:
        raise BenchmarkError(f"{system}'s parts have {min(sizes)} to {max(sizes)} rows; expected equal counts.")


def rows_of(results: Sequence[dict[str, Any]], suffix: str) -> list[Row]:
    """Return the rows of several rounds; without the peer's figures in a smoke run."""
    ours = [result[OURS] for result in results]
    seconds, uneven = median(reply["seconds"] for reply in ours), max(reply["imbalance"] for reply in ours)
    if PEER not in results[0]:
        return [Row(f"time{suffix}", "s", seconds), Row(f"imbalance{suffix}", "1", uneven)]
    peer = [result[PEER] for result in results]
    peer_seconds, peer_uneven = median(reply["seconds"] for reply in peer), max(reply["imbalance"] for reply in peer)
    worst = min(theirs["heaviest"] / mine["heaviest"] for mine, theirs in zip(ours, peer, strict=True))
    return [
        Row(f"time{suffix}", "s", seconds, peer_seconds, ratio=peer_seconds / seconds),
        Row(f"imbalance{suffix}", "1", uneven, peer_uneven, ratio=worst),
    ]


def print_step(result: dict[str, Any]) -> None:
    """Print the modeled time of a step: the FLOPs of its slowest rank."""
    mean = result["mean"]
    lines = [
        (name, figure(heaviest / 1e12), f"{heaviest / mean - 1:.3%}")
        for name, heaviest in (
            ("rows in order", result["in_order"]),
            *((f"assigned by {system}", result[system]["heaviest"]) for system in (PEER, OURS) if system in result),
            ("no imbalance", mean),
        )
    ]
    title = f"modeled step of Qwen2.5-0.5B, {NUM_ROWS:,} rows over {NUM_RANKS} ranks: its slowest rank"
    print_table(title, ("", "forward TFLOP", "above the mean"), lines)


def print_padding() -> None:
    """Print the share of padding in the micro-batches of one rank's rows."""
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
    run(main)
