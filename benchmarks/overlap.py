"""Overlap of generation and training: the time of a step with `trainer.stream` and `trainer.lag`, on emulated devices.

Real processes, batches, futures, weight syncs and rewards; only the engines wait for given times in place of computing
(support/waiting_workers.py), so that two cores can hold 16 devices. Lengths of responses are long-tailed: their 99th
percentile is 8 times the median. A reward takes 50 ms. Half of the devices generate, half train; the time of an
update is chosen so that both take about equally long.

  sync               trainer.lag = 0: generation and training wait for each other
  streamed           trainer.stream = true: training begins with the groups that finish first
  lag_1, lag_4       trainer.lag = 1 and 4
  in_flight          lag 1, and running sequences go on with new weights: rollout.on_new_weights = "retract"
  bound              max(generation with its longest response, training) + weight sync, the mean over the steps

The ratio is the step time of `sync` divided by that of the row. `idle` is the share of the devices' time in which they
waited; with updates in flight, an engine that waits for weights does not count as waiting. `limit` is the time of a
step without overheads, from the lengths alone, plus the weight sync: of `sync` the sum of its stages, of `streamed` the
calculation in support/step_model.py, of the others the bound. With a lag above 1 or updates in flight, an engine goes
on with the next batch while others finish one, so that these rows can be below it. Figures depend on the split, and not
on this machine as long as its cores are free for the controller. With --rounds the rows take turns; medians are shown.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from support.arguments import parser_of, positive, print_skipped
from support.errors import BenchmarkError
from support.models import MODELS, write_config, write_tokenizer
from support.program import run
from support.report import Row, print_rows, print_table
from support.step_model import CONCURRENCY, GROUP_SIZE, PROMPTS_PER_ENGINE, REWARD_S, StepModel, batch_of
from support.waiting_workers import WaitingActor, WaitingGenerator, WaitingInFlightGenerator

from hybridflow.config import Config, TrainerConfig, load_config
from hybridflow.controller import Backend, ClassWithInitArgs, Role, Worker, WorkerGroup, spawn_colocated
from hybridflow.controller.ray import RayResourcePool
from hybridflow.controller.ray.local_cluster import LocalCluster
from hybridflow.data import BatchLoader
from hybridflow.data.prepare.prompt_file import prompt_row, write_prompt_file
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers.build.build_generation import open_prompts
from hybridflow.trainers.build.build_run import prepare_driver_process
from hybridflow.trainers.build.groups import build_backend, meshes_of
from hybridflow.trainers.build.role_classes import reward_class
from hybridflow.trainers.run.ppo_trainer import PPOTrainer
from hybridflow.trainers.run.run_directory import RunDirectory
from hybridflow.trainers.run.run_trainer import RunParts
from hybridflow.trainers.run.speed import Speedometer

SCHEDULES = {
    "sync": (),
    "streamed": ("trainer.stream=true",),
    "lag_1": ("trainer.lag=1",),
    "lag_4": ("trainer.lag=4",),
    "in_flight": ("trainer.lag=1", "rollout.on_new_weights=retract"),
}
"""Name of a row -> its configuration keys; the first is the reference for the others."""
ROLES = {"learn": Role.ActorRollout, "generate": Role.Rollout, "score": Role.Reward}
LONGEST = 2048
REWARD = f"""
import asyncio

async def score(solution_str, **_):
    await asyncio.sleep({REWARD_S})
    return float(len(solution_str) // 2 % 2)
"""
OBJECT_STORE_BYTES = 2**29
SMOKE = {"devices": (2,), "steps": 10, "longest": 8, "schedules": tuple(SCHEDULES)}
SHORT = {"devices": (4,), "schedules": ("sync", "streamed", "lag_1", "in_flight")}
FULL = {"devices": (4, 8, 16), "schedules": tuple(SCHEDULES)}


@dataclass(frozen=True)
class Measured:
    """Mean seconds of a step, the idle share of the devices, the limit of this row, and the bound of all rows."""

    seconds: float
    idle: float
    limit: float
    bound: float


def main() -> None:
    args = arguments()
    if args.limits:
        print_limits(args)
        return
    if "sync" not in args.schedules:
        raise BenchmarkError("--schedules lacks sync, with which the other rows are compared; add it.")
    skipped = 1 + max(map(lag_of, args.schedules))  # the first steps begin several batches, the last ones none
    if args.steps < 2 * skipped:
        raise BenchmarkError(f"--steps {args.steps} leaves no step to measure; use at least {2 * skipped}.")
    rows, lines = [], []
    with LocalCluster(2, object_store_bytes=OBJECT_STORE_BYTES):
        for devices in args.devices:
            with tempfile.TemporaryDirectory() as directory:
                runs = measure(Path(directory), devices, args, range(skipped, args.steps - skipped + 1))
            sync = median(run.seconds for run in runs["sync"])
            bound = median(run.bound for run in runs["sync"])  # its weight sync does not wait for generation
            for name, of_row in runs.items():
                seconds, idle = (median(getattr(run, key) for run in of_row) for key in ("seconds", "idle"))
                limit = bound if lag_of(name) else median(run.limit for run in of_row)
                cells = (f"{idle:.0%}", f"{sync / seconds:.2f}", f"{limit:.3f}", f"{seconds / limit - 1:.0%}")
                lines.append((f"{devices} devices, {name}", f"{seconds:.3f}", *cells))
                rows.append(Row(f"{name}_{devices}", "s", seconds, peer=sync, limit=limit, ratio=sync / seconds))
            lines.append((f"{devices} devices, bound", f"{bound:.3f}", "-", f"{sync / bound:.2f}", "-", "-"))
            rows.append(Row(f"bound_{devices}", "s", bound, peer=sync, ratio=sync / bound))
    print_table("time of a step", ("", "s", "idle", "times sync", "limit", "above"), lines)
    print_rows("overlap", rows, smoke=args.smoke)


def print_limits(args: argparse.Namespace) -> None:
    """Print the calculated times of `--steps` steps, without the weight sync; nothing is run."""
    rows, lines = [], []
    for devices in args.devices:
        models = models_of(devices // 2, args.longest, range(args.steps))
        limits = {
            "sync": mean(model.sync for model in models),
            "streamed_unbalanced": mean(model.streamed(balanced=False) for model in models),
            "streamed": mean(model.streamed() for model in models),
            "bound": mean(model.bound for model in models),
        }
        for name, seconds in limits.items():
            ratio = limits["sync"] / seconds
            lines.append((f"{devices} devices, {name}", f"{seconds:.3f}", f"{ratio:.2f}"))
            rows.append(Row(f"limit_{name}_{devices}", "s", seconds, peer=limits["sync"], ratio=ratio))
    print_table("calculated time of a step", ("", "s", "times sync"), lines)
    print_rows("overlap", rows, smoke=args.smoke)


def arguments() -> argparse.Namespace:
    skipped = f"8 and 16 devices, {', '.join(name for name in SCHEDULES if name not in SHORT['schedules'])}"
    parser = parser_of(__doc__, None, smoke=SMOKE, full=FULL, skipped=skipped)
    parser.add_argument("--steps", type=positive, default=16, metavar="N", help="steps of a run (default: 16)")
    parser.add_argument("--rounds", type=positive, default=1, metavar="N", help="runs of each row (default: 1)")
    parser.add_argument("--limits", action="store_true", help="calculate the times from the lengths alone; run nothing")
    parser.add_argument(
        "--longest", type=positive, default=LONGEST, metavar="N", help=f"tokens of a response (default: {LONGEST})"
    )
    parser.add_argument(
        "--devices", type=positive, nargs="+", default=SHORT["devices"], metavar="N", help="devices (default: 4)"
    )
    parser.add_argument(
        "--schedules", choices=SCHEDULES, nargs="+", default=SHORT["schedules"], metavar="NAME", help="rows, sync first"
    )
    args = parser.parse_args()
    print_skipped(args)
    return args


def lag_of(name: str) -> int:
    """Return the lag of a schedule."""
    return int(dict(key.split("=") for key in SCHEDULES[name]).get("trainer.lag", 0))


def measure(directory: Path, devices: int, args: argparse.Namespace, steps: Sequence[int]) -> dict[str, list[Measured]]:
    """Run all schedules in turn, `--rounds` times; return what was measured in `steps` of each."""
    write_task(directory, devices)
    names = [(name, number) for number in range(args.rounds) for name in args.schedules]
    configs = {f"{name}_{number}": config_of(directory, devices, name, number, args) for name, number in names}
    first = next(iter(configs.values()))
    prepare_driver_process(first)
    runs: dict[str, list[Measured]] = {name: [] for name in args.schedules}
    with closing(build_backend(first)) as backend:
        groups = build_all(configs, backend)
        for name, number in names:
            config = configs[f"{name}_{number}"]
            dataset = open_prompts(config, config.data.train_files, 0, "")
            loader = BatchLoader(dataset, config.data.train_batch_size)
            run = RunDirectory(config, "train")
            trainer = PPOTrainer(
                RunParts(
                    config, groups[f"{name}_{number}"], loader, None, args.steps, run, Speedometer({}), backend=backend
                )
            )
            trainer.fit()
            found = figures(config, steps)
            print(f"{devices} devices, {name}: {found.seconds:.3f} s", file=sys.stderr, flush=True)
            runs[name].append(found)
    return runs


def build_all(configs: Mapping[str, Config], backend: Backend) -> dict[str, dict[Role, WorkerGroup]]:
    """Start the workers of all runs in the same processes, which take seconds to start; the runs take turns."""
    first = next(iter(configs.values()))
    groups: dict[str, dict[Role, WorkerGroup]] = {name: {} for name in configs}
    for pool, role in ROLES.items():
        processes, share = first.placement.pools[pool], first.controller.cpus_per_worker
        classes = {
            f"{name}.{role.value}": ClassWithInitArgs(worker_class(role, config), config=config)
            for name, config in configs.items()
        }
        meshes = dict.fromkeys(classes, meshes_of(first, [role.value])[role.value])
        resource_pool = RayResourcePool(processes, use_gpu=False, name_prefix=pool, cpus_per_process=share)
        on_pool = spawn_colocated(resource_pool, classes, backend, meshes)
        for name, of_run in groups.items():
            of_run[role] = on_pool[f"{name}.{role.value}"]
    return groups


def worker_class(role: Role, config: Config) -> type[Worker]:
    """Return the class of a role's workers."""
    if role is Role.Reward:
        return reward_class(config)
    if role is Role.ActorRollout:
        return WaitingActor
    return WaitingInFlightGenerator if config.updates_in_flight else WaitingGenerator


def figures(config: Config, steps: Sequence[int]) -> Measured:
    """Return the figures of a finished run in `steps`."""
    run_dir, pools = Path(config.trainer.run_dir), config.placement.pools
    metrics = {row["step"] - 1: row for row in read_jsonl(run_dir / "metrics.jsonl")}
    seconds, sync = (mean(metrics[step][f"timing_s/{name}"] for step in steps) for name in ("step", "weight_sync"))
    models = models_of(sum(pools["generate"]), config.data.max_response_length, steps)
    generating = sum(sum(model.generation) for model in models)
    if config.updates_in_flight:  # the batches of an engine share decoding steps
        generating = finishing_s(run_dir, steps)
    busy = generating + sum(model.num_ranks * model.training for model in models)
    idle = 1 - busy / len(steps) / (sum(pools["generate"] + pools["learn"]) * seconds)
    limit = mean(model.streamed() if config.trainer.stream else model.sync for model in models) + sync
    return Measured(seconds, idle, limit, mean(model.bound for model in models) + sync)


def models_of(num_engines: int, longest: int, steps: Sequence[int]) -> list[StepModel]:
    """Return the calculation of each step; as many ranks train as there are engines."""
    return [StepModel(batch_of(TrainerConfig().seed, step, num_engines, longest), num_engines) for step in steps]


def finishing_s(run_dir: Path, steps: Sequence[int]) -> float:
    """Return the seconds in `steps` for which engines generated begun batches, summed over the engines."""
    calls = [row for row in read_jsonl(run_dir / "trace" / "calls.jsonl") if row["kind"] == "call"]
    updates = [(row["step"] - 1, row["end"]) for row in calls if row["where"].endswith(".update_actor")]
    start, end = (max(ended for step, ended in updates if step == edge) for edge in (steps[0] - 1, steps[-1]))
    finishing = [row for row in calls if row["where"].endswith(".finish_sequences")]
    return sum(max(0.0, min(row["end"], end) - max(row["start"], start)) for row in finishing)


def write_task(directory: Path, devices: int) -> None:
    """Write a model's configuration, prompts and a reward."""
    write_config(directory / "model", "small")
    write_tokenizer(directory / "model", MODELS["small"]["vocab_size"] - 1)
    rows = [
        prompt_row(data_source="d", prompt=f"{i % 80 + 1} 2", ground_truth="", split="train", index=i)
        for i in range(4 * PROMPTS_PER_ENGINE * (devices // 2))
    ]
    write_prompt_file(directory / "train.parquet", rows)
    (directory / "reward.py").write_text(REWARD)


def config_of(directory: Path, devices: int, name: str, number: int, args: argparse.Namespace) -> Config:
    """Return the configuration of one run of a schedule on `devices`."""
    half = devices // 2
    settings = {
        "model.path": f"{directory}/model",
        "model.dtype": "float32",
        "data.train_files": f"['{directory}/train.parquet']",
        "data.train_batch_size": PROMPTS_PER_ENGINE * half,
        "data.max_prompt_length": 4,
        "data.max_response_length": args.longest,
        "data.chat_template": "false",
        "rollout.group_size": GROUP_SIZE,
        "actor.old_log_probs_from": "rollout",
        "reward.function": f"{directory}/reward.py:score",
        "reward.concurrency": CONCURRENCY,
        "reward.processes": 1,
        "trainer.run_dir": f"{directory}/{name}_{number}",
        "trainer.total_steps": args.steps,
        "controller.backend": "ray",
        "controller.cpus_per_worker": 1 / devices,
        "controller.threads": 1,
        "placement.pools": f"{{learn=[{half}],generate=[{half}],score=[1]}}",
        "placement.roles.rollout": "generate",
        "placement.roles.reward": "score",
    }
    return load_config(None, [*(f"{key}={value}" for key, value in settings.items()), *SCHEDULES[name]])


if __name__ == "__main__":
    run(main)
