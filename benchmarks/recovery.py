"""What recovery costs: a snapshot after every step, and the time until a run goes on after a worker is killed.

The demo's GRPO (2.6M parameters, 64 prompts with 8 responses) trains on Ray with two ranks, twice with the same seed.
One run takes a snapshot before every even step, the other one before every odd step, so that each step, with the same
samples, is timed with and without a snapshot: from its begin to that of the next one, so that the copy and what is
written beside training count. Then ranks are killed in turn, each in the middle of a step, and the time from the error
to the restored run is read from `recoveries.jsonl`. In the first run standbys wait to replace the ranks.
"""

import logging
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from support.arguments import parser_of, positive
from support.countdown import configured, write_task
from support.program import run
from support.report import Row, print_rows

from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers import build_trainer

WARM_UP = 2


def main() -> None:
    smoke = {"pairs": 1, "kills": 1, "changes": ["data.train_batch_size=4", "rollout.group_size=2"]}
    parser = parser_of(__doc__, None, smoke=smoke)
    parser.add_argument("--pairs", type=positive, default=30, metavar="N", help="steps that are compared (default: 30)")
    parser.add_argument("--kills", type=positive, default=5, metavar="N", help="killed ranks (default: 5)")
    parser.set_defaults(changes=[])
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_task(directory, sft_steps=2, problems=8)
        even, odd = (seconds_of_run(directory, args, first) for first in (0, 1))
        by_standby, recovered = (
            [row["seconds"] for row in read_jsonl(directory / f"run_{first}" / "recoveries.jsonl")] for first in (0, 1)
        )
        size = sum(path.stat().st_size for path in (directory / "run_1" / "checkpoints").rglob("*.safetensors"))
    shares = []
    for step in range(WARM_UP, WARM_UP + args.pairs):
        protected, other = (even, odd) if step % 2 == 0 else (odd, even)
        shares.append(protected[step] / other[step] - 1)
    rows = [
        Row("step", "s", statistics.median([*even.values(), *odd.values()])),
        Row("snapshot", "MB", size / 1e6),
        Row("snapshot_share", "share of a step", statistics.median(shares), limit=0.03),
        Row("recovery", "s", statistics.median(recovered), limit=10.0),
        Row("recovery_longest", "s", max(recovered), limit=10.0),
        Row("standby_recovery", "s", statistics.median(by_standby)),
        Row("standby_recovery_longest", "s", max(by_standby)),
    ]
    print_rows("recovery", rows, smoke=args.smoke)


def seconds_of_run(directory: Path, args: Namespace, first: int) -> dict[int, float]:
    """Train, with snapshots before every second step from step `first` on, and kills at the end.

    Return the seconds of each step before the kills, by its number.
    """
    first_kill = WARM_UP + args.pairs + 1
    changes = ["controller.backend=ray", "controller.num_workers=2", "data.val_files=[]", "trainer.save_every_s=0"]
    total_steps = first_kill + 2 * args.kills + 2  # a step may be shorter than those by which a kill is timed
    changes += [f"trainer.total_steps={total_steps}", f"controller.threads={args.threads or 1}"]
    changes.append(f"recovery.standby={'true' if first == 0 else 'false'}")
    changes += [f"model.path={directory}/model", "trainer.val_every=0", "trainer.val_before_train=false", *args.changes]
    begins: dict[int, float] = {}
    killed: set[int] = set()
    with build_trainer(configured("countdown_grpo", directory, f"run_{first}", changes)) as trainer:
        recovery, train_step = trainer.recovery, trainer.train_step
        assert recovery is not None
        begin_snapshot = recovery.begin_snapshot

        def begin() -> None:
            step = trainer.global_step
            begins.setdefault(step, time.perf_counter())
            if step % 2 == first or step >= first_kill:
                begin_snapshot()

        def step() -> list[dict[str, Any]]:
            number = trainer.global_step
            is_due = number > first_kill and (number - first_kill) % 2 == 1 and number not in killed
            if is_due and len(killed) < args.kills:
                killed.add(number)
                worker: Any = trainer.actor.workers[len(killed) % 2]
                delay_s = 0.5 * (begins[WARM_UP + 1] - begins[WARM_UP])
                threading.Timer(delay_s, os.kill, (worker.process.home.address.pid, signal.SIGKILL)).start()
            return train_step()

        vars(recovery)["begin_snapshot"] = begin
        vars(trainer)["train_step"] = step
        print(f"run {first + 1} of 2: {args.pairs} steps, then {args.kills} kills", file=sys.stderr, flush=True)
        trainer.fit()
    assert len(killed) == args.kills
    return {step: begins[step + 1] - begins[step] for step in range(WARM_UP, WARM_UP + args.pairs)}


if __name__ == "__main__":
    run(main)
