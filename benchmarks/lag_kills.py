"""Kills and resumes of a run with `trainer.lag`: is the result that of an uninterrupted run, byte for byte?

A tiny model trains on Ray with generation in a process of its own, so that batches have begun whenever it is killed.
SIGKILL goes in turn to the driver and to one of the two worker processes, at random times. The same command then
continues from the newest checkpoint. At the end final weights, metrics (without times) and samples are compared
with those of a run without kills, and each epoch must have used each prompt once. Exits with status 1 otherwise.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from support.arguments import parser_of, positive
from support.echo_task import REWARD, TASK
from support.environments import ROOT
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, print_rows

from hybridflow.data import prompt_row, write_prompt_file
from hybridflow.runtime.observe import read_jsonl

sys.path.append(str(ROOT / "examples"))
from countdown_task import write_model

BATCH_SIZE, GROUP_SIZE, NUM_PROMPTS = 8, 2, 24
VICTIMS = ("driver", "first worker", "driver", "second worker")
STEPS_PER_KILL = 8
"""A process makes 1 to 6 steps before it is killed, and some more until the signal arrives."""
START_TIMEOUT_S = 300.0
VARYING = ("timing_s/", "timing_per_token_ms/", "perf/", "mfu/", "memory_bytes/", "transfer/")


def main() -> int:
    parser = parser_of(__doc__, None, smoke={"kills": 2})
    parser.add_argument("--kills", type=positive, default=50, metavar="N", help="processes to kill (default: 50)")
    parser.add_argument("--lag", type=positive, default=2, metavar="N", help="trainer.lag (default: 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the times of kills (default: 0)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory, steps = Path(folder), STEPS_PER_KILL * (args.kills + 1)
        write_task(directory)
        whole, killed = (command_of(directory, name, steps, args.lag) for name in ("whole", "killed"))
        finish(whole, directory)
        chance, last_step = random.Random(args.seed), 0
        for index in range(args.kills):
            victim = VICTIMS[index % len(VICTIMS)]
            last_step = run_and_kill(killed, directory, victim, last_step + chance.randint(1, 6), 0.3 * chance.random())
            print(f"kill {index + 1} of {args.kills}: {victim}, after step {last_step}", file=sys.stderr, flush=True)
        finish(killed, directory)
        different = differences(directory, steps)
        misused = misused_prompts(directory / "killed", steps)
    print(f"{args.kills} kills, {steps} steps; differing: {', '.join(different) or 'nothing'}")
    rows = [
        Row("kills", "count", args.kills),
        Row("differing_results", "count", len(different), limit=0),
        Row("prompts_not_used_once", "count", misused, limit=0),
    ]
    print_rows("lag_kills", rows, smoke=args.smoke)
    return 1 if different or misused else 0


def write_task(directory: Path) -> None:
    """Write model, prompts that all differ, reward and recipe."""
    write_model(directory / "model", seed=0, width=32, layers=2, heads=2)
    rows = [
        prompt_row(data_source="echo", prompt=str(number), ground_truth=str(number), split="train", index=number)
        for number in range(1, NUM_PROMPTS + 1)
    ]
    write_prompt_file(directory / "train.parquet", rows)
    (directory / "reward.py").write_text(REWARD)
    recipe = TASK.replace("{directory}", str(directory)).replace(
        "log_samples = 0", f"log_samples = {GROUP_SIZE * BATCH_SIZE}"
    )
    (directory / "task.toml").write_text(recipe.replace("= 64", f"= {BATCH_SIZE}"))


def command_of(directory: Path, name: str, steps: int, lag: int) -> list[str]:
    """Return the command of a run that saves a checkpoint after every step."""
    return [
        *(sys.executable, "-m", "hybridflow", "train", f"{directory}/task.toml", f"trainer.run_dir={directory}/{name}"),
        *(f"trainer.total_steps={steps}", f"trainer.lag={lag}", "algorithm.rollout_weights=token"),
        *(f"rollout.group_size={GROUP_SIZE}", "trainer.save_every=1", "trainer.save_in_background=true"),
        *("controller.backend=ray", "controller.cpus_per_worker=0.5", "controller.threads=1"),
        *("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate"),
        *("controller.object_store_bytes=100000000", "recovery.max_restarts=0"),
    ]


@contextmanager
def started(command: list[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command with its output in a file, and kill it if the block raises."""
    with (directory / "output.txt").open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as it:
        try:
            yield it
        except BaseException:
            it.kill()
            raise


def finish(command: list[str], directory: Path) -> None:
    """Run a command to its end. Raises BenchmarkError if it fails."""
    with started(command, directory) as process:
        status = process.wait()
    if status:
        raise BenchmarkError(f"the run exited with status {status}: {tail(directory)}")


def run_and_kill(command: list[str], directory: Path, victim: str, step: int, delay_s: float) -> int:
    """Run a command until `step` has its metrics, kill one process after a delay, and return the last logged step."""
    with started(command, directory) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while last_step(directory / "killed") < step:
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"the run did not reach step {step}: {tail(directory)}")
            time.sleep(0.01)
        pid = process.pid if victim == "driver" else workers_of(process.pid)[victim == "second worker"]
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        status, expected = process.wait(), -signal.SIGKILL if victim == "driver" else 75
    if status != expected:
        raise BenchmarkError(f"the run exited with status {status} instead of {expected}: {tail(directory)}")
    return last_step(directory / "killed")


def workers_of(driver: int) -> list[int]:
    """Return the process ids of the training and the generating process, in ascending order."""
    children = psutil.Process(driver).children(recursive=True)
    pids = sorted(child.pid for child in children if "ray::WorkerProcess" in " ".join(child.cmdline()))
    if len(pids) != 2:
        raise BenchmarkError(f"{len(pids)} workers instead of 2 were found below process {driver}.")
    return pids


def last_step(directory: Path) -> int:
    """Return the last step with metrics; 0 without."""
    path = directory / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return next((json.loads(line)["step"] for line in reversed(lines) if line.endswith(b"\n")), 0)


def differences(directory: Path, steps: int) -> list[str]:
    """Return the names of the results in which the two runs differ."""
    whole, killed = (results_of(directory / name, steps) for name in ("whole", "killed"))
    return [name for name in whole if whole[name] != killed[name]]


def results_of(path: Path, steps: int) -> dict[str, Any]:
    """Return weights and optimizer state, metrics and samples of a run."""
    checkpoint = path / "checkpoints" / f"step_{steps:06d}"
    rows = read_jsonl(path / "metrics.jsonl")
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        raise BenchmarkError(f"'{path}' has metrics of {len(rows)} steps; expected {steps}.")
    return {
        "actor.safetensors": (checkpoint / "actor.safetensors").read_bytes(),
        "actor.json": (checkpoint / "actor.json").read_bytes(),
        "metrics": [{name: row[name] for name in sorted(row) if not name.startswith(VARYING)} for row in rows],
        "samples": (path / "samples.jsonl").read_bytes(),
    }


def misused_prompts(path: Path, steps: int) -> int:
    """Return how often a prompt was used more or less than once in an epoch."""
    prompts = [sample["prompt"] for sample in read_jsonl(path / "samples.jsonl")][::GROUP_SIZE]
    epochs = [prompts[start : start + NUM_PROMPTS] for start in range(0, steps * BATCH_SIZE, NUM_PROMPTS)]
    return sum(NUM_PROMPTS - len(set(epoch)) for epoch in epochs)


def tail(directory: Path) -> str:
    """Return the last line of the output of the run."""
    return (directory / "output.txt").read_text(errors="replace").strip().rpartition("\n")[2]


if __name__ == "__main__":
    run(main)
