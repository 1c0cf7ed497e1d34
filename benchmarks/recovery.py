"""What recovery costs: a snapshot after every step, and the time until a run goes on after a worker is killed.

The demo's GRPO (2.6M parameters, 64 prompts with 8 responses) trains on Ray with two ranks. Steps with and without a
snapshot alternate; both are timed from the begin of a step to the begin of the next one, so that the copy and what is
written beside training count. Then ranks are killed in turn, each in the middle of a step, and the time from the error
to the restored run is read from `recoveries.jsonl`.
"""

import itertools
import logging
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from support.arguments import parser_of, positive
from support.countdown import configured, write_task
from support.program import run
from support.report import Row, print_rows

from hybridflow.observability import read_jsonl
from hybridflow.trainers import PPOTrainer, build_trainer


def main() -> None:
    smoke = {"pairs": 1, "kills": 1, "changes": ["data.train_batch_size=4", "rollout.group_size=2"]}
    parser = parser_of(__doc__, None, smoke=smoke)
    parser.add_argument("--pairs", type=positive, default=30, metavar="N", help="steps of each kind (default: 30)")
    parser.add_argument("--kills", type=positive, default=5, metavar="N", help="killed ranks (default: 5)")
    parser.set_defaults(changes=[])
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warm_up = 2
    steps = warm_up + 2 * args.pairs + 2 * args.kills
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_task(directory, sft_steps=2, problems=8)
        changes = ["controller.backend=ray", "controller.num_workers=2", "data.val_files=[]", "trainer.save_every_s=0"]
        changes += [f"trainer.total_steps={steps}", f"controller.threads={args.threads or 1}", *args.changes]
        changes += [f"model.path={directory}/model", "trainer.val_every=0", "trainer.val_before_train=false"]
        with build_trainer(configured("countdown_grpo", directory, "run", changes)) as trainer:
            begins, protected = timed_steps(trainer, warm_up, args.pairs, args.kills)
            trainer.fit()
        recovered = [row["seconds"] for row in read_jsonl(directory / "run" / "recoveries.jsonl")]
        size = sum(path.stat().st_size for path in (directory / "run" / "checkpoints").rglob("*.safetensors"))
    seconds = {step: end - begin for (step, begin), (_, end) in itertools.pairwise(begins)}
    shares = [
        (seconds[step] - seconds[step + 1]) / seconds[step + 1] for step in range(warm_up, warm_up + 2 * args.pairs, 2)
    ]
    assert all(protected[step] != protected[step + 1] for step in range(warm_up, warm_up + 2 * args.pairs, 2))
    rows = [
        Row("step", "s", statistics.median(seconds[step] for step in seconds if step >= warm_up)),
        Row("snapshot", "MB", size / 1e6),
        Row("snapshot_share", "share of a step", statistics.median(shares), limit=0.03),
        Row("recovery", "s", statistics.median(recovered), limit=10.0),
        Row("recovery_longest", "s", max(recovered), limit=10.0),
    ]
    print_rows("recovery", rows, smoke=args.smoke)


def timed_steps(
    trainer: PPOTrainer, warm_up: int, pairs: int, kills: int
) -> tuple[list[tuple[int, float]], dict[int, bool]]:
    """Note the begin of each step, take a snapshot before every second one, and kill a rank in some steps after them.

    Return (step, time) for each begin, and for each step whether it began with a snapshot.
    """
    begins: list[tuple[int, float]] = []
    protected: dict[int, bool] = {}
    recovery, train_step = trainer.recovery, trainer.train_step
    assert recovery is not None
    begin_snapshot, first_kill, killed = recovery.begin_snapshot, warm_up + 2 * pairs, set()

    def begin() -> None:
        step = trainer.global_step
        begins.append((step, time.perf_counter()))
        protected[step] = step % 2 == 0 or step >= first_kill
        if protected[step]:
            begin_snapshot()

    def step() -> list[dict[str, Any]]:
        number = trainer.global_step
        if number >= first_kill and number % 2 == 1 and number not in killed:
            killed.add(number)
            worker: Any = trainer.actor.workers[len(killed) % 2]
            delay_s = 0.5 * statistics.median(end - start for (_, start), (_, end) in itertools.pairwise(begins))
            threading.Timer(delay_s, os.kill, (worker.process.home.address.pid, signal.SIGKILL)).start()
        return train_step()

    vars(recovery)["begin_snapshot"] = begin
    vars(trainer)["train_step"] = step
    print(f"{pairs} pairs of steps, then {kills} kills", file=sys.stderr, flush=True)
    return begins, protected


if __name__ == "__main__":
    run(main)
