"""Countdown with a reward that takes 200 ms: the time of a step with `trainer.stream` and `trainer.lag`.

The demo's GRPO from a warm start, on Ray: one process trains, one generates, both with one thread, and two score, each
64 responses at once. All rows have importance weights of each token, which a lag needs.

  sync      trainer.lag = 0: generation, rewards and training wait for each other
  streamed  trainer.stream = true: groups are scored and learned from as they finish
  lag_1     trainer.lag = 1: the next batch is generated meanwhile

The rows alternate in each round. The figure is the median over the steps of all rounds, without the first two steps and
the last, in which batches begin or none is left. The ratio is the time of `sync` divided by that of the row.
"""

import logging
import statistics
import sys
import tempfile
from pathlib import Path

from support.arguments import parser_of, positive
from support.countdown import reinforce, warm_start, write_task
from support.program import run
from support.report import Row, print_rows

REWARD = """
import asyncio

from hybridflow.environments.rewards import countdown_reward


async def score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.2)
    return countdown_reward(data_source, solution_str, ground_truth, extra_info)
"""
ROWS = {"sync": (), "streamed": ("trainer.stream=true",), "lag_1": ("trainer.lag=1",)}
"""Name of a row -> its configuration keys; the first is the reference for the others."""


def main() -> None:
    smoke = {"repeats": 1, "steps": 4, "sft_steps": 2}
    parser = parser_of(__doc__, None, smoke={**smoke, "changes": ["data.train_batch_size=4", "rollout.group_size=2"]})
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="runs of each row (default: 3)")
    parser.add_argument("--steps", type=positive, default=12, metavar="N", help="steps of a run (default: 12)")
    parser.add_argument("--sft-steps", type=positive, default=300, metavar="N", help="of the warm start (default: 300)")
    parser.set_defaults(changes=[])
    args = parser.parse_args()
    if args.steps < 4:
        parser.error(f"--steps {args.steps} leaves no step to measure: use at least 4.")
    logging.disable(logging.INFO)
    seconds: dict[str, list[float]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_task(directory, args.sft_steps, problems=8)
        (directory / "reward.py").write_text(REWARD)
        warm_start(directory, [f"trainer.total_steps={args.sft_steps}"])
        common = [
            "controller.backend=ray",
            "controller.threads=1",
            "placement.pools={learn=[1],generate=[1],score=[1]}",
            "placement.roles={rollout='generate',reward='score'}",
            f"reward.function={directory}/reward.py:score",
            "reward.processes=2",
            "reward.concurrency=64",
            "algorithm.rollout_weights=token",
            "data.val_files=[]",
            f"trainer.total_steps={args.steps}",
            *args.changes,
        ]
        for repeat in range(args.repeats):
            for name in ROWS if repeat % 2 == 0 else reversed(ROWS):
                metrics = reinforce(directory, f"{name}_{repeat}", 0, [*common, *ROWS[name]])
                seconds[name] += [row["timing_s/step"] for row in metrics[2:-1]]
                median = statistics.median(seconds[name])
                print(f"round {repeat + 1}/{args.repeats}: {name} {median:.2f} s a step", file=sys.stderr, flush=True)
    sync = statistics.median(seconds["sync"])
    medians = {name: statistics.median(of_row) for name, of_row in seconds.items()}
    rows = [Row(name, "s", median, peer=sync, ratio=sync / median) for name, median in medians.items()]
    print_rows("slow_reward", rows, smoke=args.smoke)


if __name__ == "__main__":
    run(main)
