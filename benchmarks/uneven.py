"""Steps on ranks of unequal speed: parts by measured speed against equal parts, and against a perfect split.

The demo's GRPO (2.6M parameters, 64 prompts with 8 responses) trains on Ray, in three runs:

  rank    two ranks that generate and train; a program stops rank 1 for two thirds of each 30 ms, so that it is three
          times slower
  engine  one rank that trains and two rollout engines, of which one is two times slower; times are those of generation
  even    two ranks of equal speed

Each run adapts for some steps. Then it makes its steps in turn with parts by measured speed, with equal parts, and
(rank, engine) with equal parts on undisturbed ranks. With t the median time on undisturbed ranks and s the one with
equal parts, the slow rank is s / t times slower, and a perfect split takes t * 2 / (1 + t / s). Steps are timed from
the begin of one to that of the next, with the measurements between them.
"""

import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from support.arguments import parser_of, positive
from support.countdown import configured, write_task
from support.program import run
from support.report import Row, print_rows

from hybridflow.controller.part_sizes import GroupShares
from hybridflow.trainers import PPOTrainer, build_trainer

ENGINES = ("placement.pools={learn=[1],generate=[2]}", "placement.roles.rollout=generate")
RANKS = ("controller.num_workers=2",)
SLOWER = {"rank": 3.0, "engine": 2.0}
LAYOUTS = {"rank": RANKS, "engine": ENGINES, "even": RANKS}
MEASURED, EQUAL, UNDISTURBED = "measured", "equal", "undisturbed"
LARGEST_LOSS = {"rank": 0.1, "engine": 0.1, "even": 0.02}
"""The wanted time beyond that of a perfect split, and with ranks of equal speed beyond that of equal parts."""

SLOW_DOWN = """
import os, signal, sys, threading, time
pid, period_s = int(sys.argv[1]), 0.03
share_s = period_s / float(sys.argv[2])
is_on = threading.Event()
def stop_and_continue():
    while True:
        is_on.wait()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(period_s - share_s)
        os.kill(pid, signal.SIGCONT)
        time.sleep(share_s)
threading.Thread(target=stop_and_continue, daemon=True).start()
for line in sys.stdin:
    is_on.set() if line == "on\\n" else is_on.clear()
is_on.clear()
time.sleep(period_s)
os.kill(pid, signal.SIGCONT)
"""
"""Stops a process and continues it, from a line "on" until a line "off" or the end of the input."""


def main() -> None:
    smoke = {"adapting": 1, "rounds": 1, "changes": ["data.train_batch_size=4", "rollout.group_size=2"]}
    parser = parser_of(__doc__, None, smoke=smoke)
    parser.add_argument("--adapting", type=positive, default=10, metavar="N", help="steps to adapt in (default: 10)")
    parser.add_argument("--rounds", type=positive, default=12, metavar="N", help="steps of each kind (default: 12)")
    parser.add_argument("--runs", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="runs to make (default: all)")
    parser.set_defaults(changes=[])
    args = parser.parse_args()
    logging.disable(logging.INFO)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_task(directory, sft_steps=2, problems=8)
        for name in args.runs:
            print(f"{name}: {args.adapting} steps, then {args.rounds} of each kind", file=sys.stderr, flush=True)
            rows += rows_of(name, *seconds_of_run(directory, name, args))
    print_rows("uneven", rows, smoke=args.smoke)


def rows_of(name: str, seconds: dict[str, list[float]], least: float) -> list[Row]:
    """Return the rows of a run from the seconds of its steps by kind, and the smallest part in the end."""
    measured, equal = median(seconds[MEASURED]), median(seconds[EQUAL])
    limit = equal
    if UNDISTURBED in seconds:
        undisturbed = median(seconds[UNDISTURBED])
        limit = undisturbed * 2 / (1 + undisturbed / equal)
    return [
        Row(f"{name}_seconds", "s", measured, equal, limit, equal / measured),
        Row(f"{name}_loss", "share", measured / limit - 1, limit=LARGEST_LOSS[name]),
        Row(f"{name}_smallest_part", "share of an equal one", least),
    ]


def seconds_of_run(directory: Path, name: str, args: Any) -> tuple[dict[str, list[float]], float]:
    """Train; return the seconds of each step by its kind, and the smallest part relative to an equal one."""
    kinds = [MEASURED, EQUAL, *[UNDISTURBED] * (name in SLOWER)]
    steps = args.adapting + args.rounds * len(kinds) + 1
    changes = ["controller.backend=ray", "data.val_files=[]", "trainer.save_every_s=0"]
    changes += [
        f"trainer.total_steps={steps}",
        f"controller.threads={args.threads or 1}",
        "trainer.deterministic=false",
    ]
    changes += [
        "trainer.deterministic=false",
        "controller.parts=measured",
        "recovery.snapshot_every=0",
        f"model.path={directory}/model",
    ]
    changes += ["trainer.val_every=0", "trainer.val_before_train=false", *LAYOUTS[name], *args.changes]
    begins: list[float] = []
    of_kinds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with build_trainer(configured("countdown_grpo", directory, f"run_{name}", changes)) as trainer:
        worker: Any = trainer.rollout.workers[1]
        with slowing_down(worker.process.home.address.pid, SLOWER.get(name, 1.0)) as slow_down:

            def kind_of(step: int) -> str:
                return kinds[(step - args.adapting) % len(kinds)] if step >= args.adapting else MEASURED

            def train_step() -> list[Any]:
                kind = kind_of(trainer.global_step)
                slow_down(name in SLOWER and kind != UNDISTURBED)
                begins.append(time.perf_counter())
                if kind == MEASURED:
                    return original_step()
                with equal_parts(trainer):
                    return original_step()

            def note_step(seconds: float) -> None:
                kind = kind_of(trainer.global_step - 1)
                if kind == MEASURED:
                    original_note(seconds)
                if trainer.global_step > args.adapting and name == "engine":
                    of_kinds[kind].append(trainer.metrics["timing_s/gen"])

            original_step = trainer.train_step
            vars(trainer)["train_step"] = train_step
            speeds = trainer.rank_speeds or Nothing()
            original_note = speeds.note_step
            vars(speeds)["note_step"] = note_step
            trainer.rank_speeds = speeds  # pyright: ignore[reportAttributeAccessIssue]
            trainer.fit()
        least = [share for group in trainer.groups.values() for share in group.shares.least().values()]
    if name != "engine":
        for step in range(args.adapting, steps - 1):
            of_kinds[kind_of(step)].append(begins[step + 1] - begins[step])
    return of_kinds, min(least, default=1.0)


class Nothing:
    """Stands for the speeds of ranks in a run whose ranks do not share a model."""

    def note_step(self, seconds: float) -> None:
        """Measure nothing."""


@contextmanager
def equal_parts(trainer: PPOTrainer) -> Iterator[None]:
    """Make the calls of the block with equal parts, unmeasured."""
    measured = {role: group.shares for role, group in trainer.groups.items()}
    for group in trainer.groups.values():
        equal = dict.fromkeys(group.methods, "equal")
        group.shares = GroupShares(group.name, equal, group.backend.trace)
    try:
        yield
    finally:
        for role, group in trainer.groups.items():
            group.shares = measured[role]


@contextmanager
def slowing_down(pid: int, times: float) -> Iterator[Any]:
    """Yield a function that turns on and off that a process gets 1 / `times` of the time."""
    command = [sys.executable, "-c", SLOW_DOWN, str(pid), str(times)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        stdin = program.stdin

        def turn(on: bool) -> None:
            stdin.write("on\n" if on else "off\n")
            stdin.flush()

        yield turn


if __name__ == "__main__":
    run(main)
