"""Overlap of generation and training: the time of a step with `trainer.stream` and `trainer.lag`, on emulated devices.

Real processes, batches, futures, weight syncs and rewards; only the engines wait for given times in place of computing
(support/waiting_workers.py), so that two cores can hold 16 devices. Lengths of responses are long-tailed: their 99th
percentile is 8 times the median. A reward takes 50 ms. Half of the devices generate, half train; the time of an
update is chosen so that both take about equally long.

  sync     trainer.lag = 0: generation and training wait for each other
  streamed trainer.stream = true: training begins with the groups that finish first
  lag_1, lag_4
  bound    max(generation with its longest response, training) + weight sync, the mean over the steps

The ratio is the step time of `sync` divided by that of the row. `idle` is the share of the devices' time in which they
waited. The figures depend on the split, not on this machine, as long as its cores are free for the controller.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from support.arguments import parser_of, positive
from support.errors import BenchmarkError
from support.models import MODELS, write_config, write_tokenizer
from support.program import run
from support.report import Row, print_rows, print_table
from support.waiting_workers import STEP_S, TOKEN_S, WaitingActor, WaitingGenerator, response_length

from hybridflow.config import Config, load_config
from hybridflow.controller import ClassWithInitArgs, Role
from hybridflow.data import BatchLoader
from hybridflow.data.prepare.prompt_file import prompt_row, write_prompt_file
from hybridflow.observability import read_jsonl
from hybridflow.trainers.build_generation import open_prompts
from hybridflow.trainers.build_run import prepare_driver_process
from hybridflow.trainers.groups import build_backend, build_groups, closing_on_error
from hybridflow.trainers.ppo_trainer import PPOTrainer
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.sampling import TRAINING_STREAM
from hybridflow.trainers.speed import Speedometer
from hybridflow.workers import RewardWorker

SCHEDULES = {
    "sync": (),
    "streamed": ("trainer.stream=true", "controller.balance=none"),
    "lag_1": ("trainer.lag=1",),
    "lag_4": ("trainer.lag=4",),
}
"""Name of a row -> its configuration keys; the first is the reference for the others."""
PROMPTS_PER_DEVICE, GROUP_SIZE, LONGEST = 8, 4, 2048
REWARD = """
import asyncio

async def score(solution_str, **_):
    await asyncio.sleep(0.05)
    return float(len(solution_str) // 2 % 2)
"""
SMOKE = {"devices": (2,), "steps": 4, "schedules": ("sync", "streamed", "lag_1")}


def main() -> None:
    args = arguments()
    skipped = 1 + max(map(lag_of, args.schedules))  # the first steps begin several batches, the last ones none
    if args.steps < 2 * skipped:
        raise BenchmarkError(f"--steps {args.steps} leaves no step to measure; use at least {2 * skipped}.")
    rows, lines = [], []
    for devices in args.devices:
        seconds, bound = {}, 0.0
        for name in args.schedules:
            with tempfile.TemporaryDirectory() as directory:
                seconds[name], idle, least = measure(Path(directory), devices, name, args.steps, skipped)
            bound = bound or least  # of the run without a lag, whose weight sync does not wait for generation
            sync = seconds["sync"]
            ratio = sync / seconds[name]
            lines.append((f"{devices} devices, {name}", f"{seconds[name]:.3f}", f"{idle:.0%}", f"{ratio:.2f}"))
            rows.append(Row(f"{name}_{devices}", "s", seconds[name], peer=sync, limit=bound, ratio=ratio))
        lines.append((f"{devices} devices, bound", f"{bound:.3f}", "-", f"{sync / bound:.2f}"))
        rows.append(Row(f"bound_{devices}", "s", bound, peer=sync, ratio=sync / bound))
    print_table("time of a step", ("", "s", "idle", "times sync"), lines)
    print_rows("overlap", rows, smoke=args.smoke)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, None, smoke=SMOKE)
    parser.add_argument("--steps", type=positive, default=16, metavar="N", help="steps of a run (default: 16)")
    parser.add_argument(
        "--devices", type=positive, nargs="+", default=(4, 8, 16), metavar="N", help="devices (default: 4 8 16)"
    )
    parser.add_argument(
        "--schedules", choices=SCHEDULES, nargs="+", default=tuple(SCHEDULES), metavar="NAME", help="rows, sync first"
    )
    return parser.parse_args()


def lag_of(name: str) -> int:
    """Return the lag of a schedule."""
    return int(name.removeprefix("lag_")) if name.startswith("lag_") else 0


def measure(directory: Path, devices: int, name: str, steps: int, skipped: int) -> tuple[float, float, float]:
    """Return the mean time of a step, the idle share of the devices, and the bound of the step time.

    The first and last `skipped` steps are not measured.
    """
    config = write_task(directory, devices, SCHEDULES[name], steps)
    prepare_driver_process(config)
    dataset = open_prompts(config, config.data.train_files, 0, "")
    classes = {
        Role.ActorRollout: ClassWithInitArgs(WaitingActor, config=config),
        Role.Rollout: ClassWithInitArgs(WaitingGenerator, config=config),
        Role.Reward: ClassWithInitArgs(RewardWorker, config=config),
    }
    with closing_on_error(build_backend(config)) as backend:
        trainer = PPOTrainer(
            config,
            build_groups(config, backend, classes),
            loader=BatchLoader(dataset, config.data.train_batch_size),
            total_steps=steps,
            run=RunDirectory(config, "train"),
            speedometer=Speedometer({}),
            backend=backend,
        )
        with trainer:
            trainer.fit()
    metrics = {row["step"] - 1: row for row in read_jsonl(directory / "run" / "metrics.jsonl")}
    measured = range(skipped, steps - skipped + 1)
    seconds = mean(metrics[step]["timing_s/step"] for step in measured)
    sync = mean(metrics[step]["timing_s/weight_sync"] for step in measured)
    generation = [generation_s(config, step) for step in range(steps)]
    training = [training_s(config, step) for step in range(steps)]
    bound = mean(max(max(generation[step]), max(training[step])) for step in measured) + sync
    busy = mean(sum(generation[step]) + sum(training[step]) for step in measured)
    return seconds, 1 - busy / (devices * seconds), bound


def lengths_of(config: Config, step: int, part: int, parts: int) -> list[int]:
    """Return the response lengths of one of `parts` equal parts of a batch."""
    size = config.data.train_batch_size // parts
    return [
        response_length((config.trainer.seed, TRAINING_STREAM, step, prompt), index, LONGEST)
        for prompt in range(part * size, (part + 1) * size)
        for index in range(GROUP_SIZE)
    ]


def generation_s(config: Config, step: int) -> Sequence[float]:
    """Return the seconds that each generating device computes."""
    parts = config.placement.pools["generate"][0]
    return [STEP_S * max(lengths_of(config, step, part, parts)) for part in range(parts)]


def training_s(config: Config, step: int) -> Sequence[float]:
    """Return the seconds that each training device computes, if rows are balanced."""
    parts = config.placement.pools["learn"][0]
    prompt_tokens = 2 * config.data.train_batch_size * GROUP_SIZE
    tokens = sum(sum(lengths_of(config, step, part, parts)) for part in range(parts)) + prompt_tokens
    return [TOKEN_S * tokens / parts] * parts


def write_task(directory: Path, devices: int, changes: Sequence[str], steps: int) -> Config:
    """Write a model's configuration, prompts and a reward; return the configuration of a run on `devices`."""
    write_config(directory / "model", "small")
    write_tokenizer(directory / "model", MODELS["small"]["vocab_size"] - 1)
    half = devices // 2
    num_prompts = PROMPTS_PER_DEVICE * half
    rows = [
        prompt_row(data_source="d", prompt=f"{i % 80 + 1} 2", ground_truth="", split="train", index=i)
        for i in range(4 * num_prompts)
    ]
    write_prompt_file(directory / "train.parquet", rows)
    (directory / "reward.py").write_text(REWARD)
    return load_config(
        None,
        [
            *(f"model.path={directory}/model", "model.dtype=float32"),
            f"data.train_files=['{directory}/train.parquet']",
            *(
                f"data.train_batch_size={num_prompts}",
                "data.max_prompt_length=4",
                f"data.max_response_length={LONGEST}",
            ),
            *(f"rollout.group_size={GROUP_SIZE}", "actor.old_log_probs_from=rollout", "data.chat_template=false"),
            *(f"reward.function={directory}/reward.py:score", "reward.concurrency=64", "reward.processes=1"),
            *(f"trainer.run_dir={directory}/run", f"trainer.total_steps={steps}", *changes),
            *("controller.backend=ray", f"controller.cpus_per_worker={1 / devices}", "controller.threads=1"),
            f"placement.pools={{learn=[{half}],generate=[{half}],score=[1]}}",
            *("placement.roles.rollout=generate", "placement.roles.reward=score"),
        ],
    )


if __name__ == "__main__":
    run(main)
