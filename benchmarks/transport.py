"""Batches between processes: hybridflow's worker groups against verl's, each on its own Ray cluster, on CPU.

A batch of 8 int64 columns of 4096 x 1024 and a column of texts (268 MB); groups of 4 workers on this machine. The
receiver of a batch reads every byte of it within the timed region; checksums are compared outside of it.

  send         a call that splits the batch over the workers, which return a checksum
  send_return  the same, and the workers return their parts, which the caller reads in full
  pass_on      an unread result of one group is passed to another group, which reads it and returns a checksum; verl's
               future is passed to a method that reads it itself (materialize_futures=False)
  tiny_call    4 rows of one column, returned unchanged; compared with as many empty calls on plain Ray actors
  pickle, unpickle                as the library sends a batch: ours with its columns out of band and not copied, verl's
                                  as one string; unpickled into private memory, ours from read-only buffers
  concat, repeat, select_idxs     8 chunks, each row 4 times, a random half of the rows; in one process

A few minutes with the default of 7 rounds on two idle cores. A missed limit is reported and is not an error.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sides.transport_batch import NUM_ROWS, REPEATS, TEXTS, build_columns, checksum, half_of_rows, width_of
from support.arguments import names_in, parser_of, positive
from support.environments import VARIABLES, python_of
from support.errors import BenchmarkError
from support.other_work import OtherWork
from support.program import run
from support.report import Row, print_rows, print_sides, print_table
from support.rounds import MUCH_OTHER_WORK, SETTLING_S
from support.side import Side

from hybridflow.protocol import DataProto
from hybridflow.runtime.threads import count_physical_cores, set_num_threads

OURS, PEER = "hybridflow", "verl"
MAKE_TARGET = "bench-transport"
NUM_WORKERS, NUM_CALLS = 4, 200
"""Workers of a group, and tiny calls in a round."""
WARM_UPS = 2
LIMITS = {
    "send": 4.0,
    "send_return": 5.0,
    "pass_on": 15.0,
    "tiny_call": None,
    "pickle": 1.0,
    "unpickle": 1.0,
    "concat": 1.0,
    "repeat": 1.0,
    "select_idxs": 1.0,
}
"""Row -> the least wanted speed-up over verl."""
EMPTY_CALLS = 2.0
"""The limit of a tiny call: the time of so many empty calls on plain actors of our cluster."""

Results = dict[str, list[dict[str, Any]]]
"""The measurements of one row: system -> its reply in each round."""


def main() -> None:
    args = arguments()
    if args.verl_serialization:
        VARIABLES[PEER]["VERL_DATAPROTO_SERIALIZATION_METHOD"] = args.verl_serialization
    systems = (OURS,) if args.smoke else (OURS, PEER)
    python_of(systems[-1], MAKE_TARGET)  # a missing environment is reported before the measurements
    threads, width = set_num_threads(args.threads or count_physical_cores()), width_of(args.megabytes)
    truth = Truth(width, args.workers)
    results: dict[str, Results] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides = [
            stack.enter_context(
                Side(
                    *(system, "int64"),
                    task="transport",
                    threads=threads,
                    directory=Path(directory),
                    make_target=MAKE_TARGET,
                    width=width,
                    workers=args.workers,
                    calls=args.calls,
                )
            )
            for system in systems
        ]
        print_sides(sides, threads)
        print(
            f"each worker uses 1 thread; the batch has {truth.num_bytes / 1e6:.0f} MB; "
            f"{PEER}'s serialization: {args.verl_serialization or 'its default'}",
            flush=True,
        )
        for name in args.rows:
            results[name] = alternate(name, sides, truth, args.rounds, args.warm_ups)
    if not args.smoke:
        print_medians(results)
    rows = [row for name in args.rows for row in rows_of(name, results[name])]
    print_rows("transport", rows, smoke=args.smoke)


def arguments() -> argparse.Namespace:
    tiny = {"rounds": 1, "warm_ups": 0, "megabytes": 2.1, "workers": 2, "calls": 20}
    parser = parser_of(__doc__, None, smoke=tiny)
    parser.add_argument(
        "--rounds",
        type=positive,
        default=7,
        metavar="N",
        help=f"rounds of each row, after {WARM_UPS} warm-ups (default: 7)",
    )
    parser.add_argument(
        "--megabytes", type=float, default=268, metavar="M", help="size of the batch, in steps of 2.1 (default: 268)"
    )
    parser.add_argument(
        "--rows",
        type=names_in(tuple(LIMITS)),
        default=tuple(LIMITS),
        metavar="A,B",
        help=f"rows (default: {','.join(LIMITS)})",
    )
    parser.add_argument(
        "--verl-serialization",
        choices=("", "numpy"),
        default="",
        help="how verl pickles tensors: its default, or with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy, faster",
    )
    parser.set_defaults(warm_ups=WARM_UPS, workers=NUM_WORKERS, calls=NUM_CALLS)
    args = parser.parse_args()
    if not args.megabytes > 0:
        parser.error(f"--megabytes={args.megabytes:g} is invalid: expected a number above 0.")
    return args


# ---------------------------------------------------------------------------------------------- expected checksums


class Truth:
    """The checksums of the batch and of its parts, computed in this process."""

    def __init__(self, width: int, num_parts: int) -> None:
        batch = DataProto.from_dict(*build_columns(width))
        whole = checksum(batch)
        _require_sensitive(batch, whole)
        repeated = [row for row in range(NUM_ROWS) for _ in range(REPEATS)]
        others = {
            "repeat": checksum(batch[repeated]),
            "select_idxs": checksum(batch[half_of_rows()]),
        }
        self._parts = [checksum(part) for part in batch.chunk(num_parts)]
        self._whole = {name: others.get(name, whole) for name in LIMITS}
        self.num_bytes = sum(tensor.nbytes for tensor in batch.batch.values())  # pyright: ignore

    def check(self, name: str, side: Side, result: dict[str, Any]) -> None:
        """Raise BenchmarkError if a received batch, whole or in parts, differs from the sent one."""
        for key, expected in (("whole", self._whole[name]), ("parts", self._parts)):
            if key in result and result[key] != expected:
                raise BenchmarkError(f"{side.system} {name}: the checksums are {result[key]} instead of {expected}.")


def _require_sensitive(batch: DataProto, whole: list[int]) -> None:
    """Require that the checksum changes with a byte of the first or last row, and with the order of two rows."""
    last = NUM_ROWS - 1
    changes = [batch[[1, 0, *range(2, NUM_ROWS)]]]
    for row, byte in ((0, 0), (last, -1)):
        changed = batch.select(deepcopy=True)
        for tensor in changed.batch.values():  # pyright: ignore
            tensor.view(torch.uint8)[row, byte] ^= 1
        text = changed.non_tensor_batch[TEXTS][row]
        changed.non_tensor_batch[TEXTS][row] = text[:-1] + "!"
        changes.append(changed)
    for changed in changes:
        if same := [index for index, number in enumerate(checksum(changed)) if number == whole[index]]:
            raise BenchmarkError(f"the checksum of column {same[0]} does not change with its bytes; repair checksum().")


# ---------------------------------------------------------------------------------------------- measuring


def alternate(name: str, sides: Sequence[Side], truth: Truth, rounds: int, warm_ups: int) -> Results:
    """Measure one row in rounds: ours, peer, peer, ours, ...; warm-ups are not returned. Warns of other programs."""
    disturbed = 0
    results: Results = {side.system: [] for side in sides}
    for number in range(1 - warm_ups, rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            time.sleep(SETTLING_S)
            with OtherWork(side.process_id) as others:
                result = side.ask(row=name)
            truth.check(name, side, result)
            much = others.share > MUCH_OTHER_WORK
            kind = f"round {number}/{rounds}" if number > 0 else "warm-up"
            note = f"; other programs used {others.share:.0%} of the machine" if much else ""
            print(f"{name}, {kind}: {side.system} {result['seconds']:.5f} s{note}", file=sys.stderr, flush=True)
            if number > 0:
                results[side.system].append(result)
                disturbed += much
    if disturbed:
        print(
            f"\nwarning: other programs, or the other side, were running in {disturbed} of {len(sides) * rounds} "
            f"measurements of {name}; its figures are not valid; run it again on an idle machine.",
            flush=True,
        )
    return results


# ---------------------------------------------------------------------------------------------- report


def rows_of(name: str, results: Results) -> list[Row]:
    """Return the medians of both sides.

    The limit is the least wanted ratio; for a tiny call, its ratio at EMPTY_CALLS times the empty call.
    """
    if PEER not in results:
        return [Row(name, "s", seconds_of(results[OURS]))]
    ours, peer = (seconds_of(results[system]) for system in (OURS, PEER))
    if name != "tiny_call":
        return [Row(name, "s", ours, peer, LIMITS[name], peer / ours)]
    our_empty, peer_empty = (seconds_of(results[system], "empty_s") for system in (OURS, PEER))
    return [
        Row(name, "s", ours, peer, peer / (EMPTY_CALLS * our_empty), peer / ours),
        Row("empty_call", "s", our_empty, peer_empty),
    ]


def seconds_of(replies: Sequence[dict[str, Any]], key: str = "seconds") -> float:
    """Return the median of a key."""
    return median(reply[key] for reply in replies)


def print_medians(results: dict[str, Results]) -> None:
    """Print each row with its spread, and whether its limit is met."""
    lines = []
    for name, of_sides in results.items():
        row = rows_of(name, of_sides)[0]
        assert row.ratio is not None
        assert row.limit is not None
        wanted = f"{row.limit:g}" if name != "tiny_call" else f"{EMPTY_CALLS:g} empty calls"
        reached = f"{row.ratio:.3g}"
        if name == "tiny_call":
            reached += f"; {row.ours / seconds_of(of_sides[OURS], 'empty_s'):.3g} empty calls"
        met = "yes" if row.ratio >= row.limit else "NO"
        lines.append((name, *(_spread(of_sides[system]) for system in (OURS, PEER)), reached, wanted, met))
        if name == "tiny_call":
            lines.append(("empty_call", *(_spread(of_sides[system], "empty_s") for system in (OURS, PEER)), "", "", ""))
    print_table("milliseconds: median (minimum to maximum)", ("", OURS, PEER, "ratio", "wanted", "met"), lines)


def _spread(replies: Sequence[dict[str, Any]], key: str = "seconds") -> str:
    values = [1e3 * reply[key] for reply in replies]
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


if __name__ == "__main__":
    run(main)
