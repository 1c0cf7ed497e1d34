"""Runs into which faults are injected: are their results those of undisturbed runs, bit for bit?

A tiny model trains on Ray with two training ranks and two rollout engines, by GRPO and by PPO. Each disturbed run gets
some faults, drawn with `--seed`: processes that are killed or stopped, delays, weights changed in transit, full disks.
Lost workers are replaced inside the run. If the driver is killed, or a checkpoint finds no space, the same command runs
again. At the end weights, optimizer, samples and metrics (without times, memory, transfers and recoveries) are
compared with those of the undisturbed run. Exits with status 1 if one differs, or if a run does not come to its end.
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from support.arguments import parser_of, positive
from support.environments import ROOT
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, print_rows, print_table

from hybridflow.config import Config, load_config
from hybridflow.config.faults import DRIVER, PHASES, Fault, kinds_at, phases_of, workers_of
from hybridflow.observability import read_jsonl

sys.path.append(str(ROOT / "tests"))
sys.path.append(str(ROOT / "examples"))
from fixtures import tiny_run

STEPS = 6
FAULTS_OF_RUN = 5
AGAIN = (75, -signal.SIGKILL)
"""Exit statuses after which the same command goes on."""
MOST_STARTS = 12
TIMEOUT_S = 900.0
SETTINGS = (
    *("controller.backend=ray", "controller.cpus_per_worker=0.5", "controller.object_store_bytes=100000000"),
    *("placement.pools={learn=[2],generate=[2]}", "placement.roles.rollout=generate"),
    *("controller.heartbeat_timeout_s=8", "faults.delay_s=1", "recovery.max_restarts=10", "recovery.backoff_s=0.1"),
    *("trainer.save_every=2", f"trainer.total_steps={STEPS}"),
)


def main() -> int:
    parser = parser_of(__doc__, None, smoke={"faults": 5})
    parser.add_argument("--faults", type=positive, default=100, metavar="N", help="faults in all (default: 100)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the faults (default: 1)")
    args = parser.parse_args()
    chance, lost, different = random.Random(args.seed), 0, []
    fired: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        directory = tiny_run.write_task(Path(folder))
        commands = tiny_run.commands(directory)
        names = list(commands)[: 1 if args.faults <= FAULTS_OF_RUN else None]
        for name in names:
            train(commands[name], directory, name, [])
        runs = -(-args.faults // FAULTS_OF_RUN)
        for index in range(runs):
            like = names[index % len(names)]
            config = load_config(directory / "rl.toml", [*commands[like][2:], *SETTINGS])
            faults = drawn(config, chance, min(FAULTS_OF_RUN, args.faults - index * FAULTS_OF_RUN))
            try:
                starts = train(commands[like], directory, f"disturbed_{index}", faults)
            except BenchmarkError as error:
                lost += 1
                print(f"run {index + 1} of {runs} is lost: {error}", file=sys.stderr, flush=True)
                continue
            found = differences(directory, like, f"disturbed_{index}")
            different += found
            rows = read_jsonl(directory / f"disturbed_{index}" / "faults" / "fired.jsonl")
            fired.update((row["phase"], row["kind"]) for row in rows)
            state = f"differs in {', '.join(found)}" if found else "equal"
            report = f"run {index + 1} of {runs} ({like}): {len(rows)} of {len(faults)} faults fired, {starts} starts"
            print(f"{report}, {state}", file=sys.stderr, flush=True)
    kinds = sorted({kind for _, kind in fired})
    table = [[phase, *(str(fired[phase, kind] or "-") for kind in kinds)] for phase in PHASES]
    print_table("faults that fired, by phase and kind", ["phase", *kinds], table)
    rows = [
        Row("faults", "count", sum(fired.values())),
        Row("lost_runs", "count", lost, limit=0),
        Row("differing_results", "count", len(different), limit=0),
    ]
    print_rows("chaos", rows, smoke=args.smoke)
    return 1 if lost or different else 0


def drawn(config: Config, chance: random.Random, count: int) -> list[str]:
    """Draw faults that a run survives with the same results; each kind of place is as likely as any other.

    Left out: an error of the program, which stops a run; too little memory, whose smaller micro-batches round
    differently; a bit of a saved file, which is found when it is read (tests/integration/test_recovery.py).
    """
    roles: Any = [
        role for role in ("actor_rollout", "critic", "rollout", "reward") if role != "critic" or config.uses_critic
    ]
    places = [
        (worker, phase, kind)
        for role, ranks in workers_of(config, roles).items()
        for worker in ([DRIVER] if role == DRIVER else [f"{role}/{rank}" for rank in range(ranks)])
        for phase in phases_of(config, role)
        for kind in kinds_at(config, worker, phase)
        if kind in ("kill", "stop", "delay", "disk") or (phase, kind) == ("sync_send", "corrupt")
        if (worker, kind) != (DRIVER, "stop")  # nothing could continue it
    ]
    return [
        str(Fault(chance.randint(1, STEPS), kind, worker, phase))
        for worker, phase, kind in (chance.choice(places) for _ in range(count))
    ]


def train(command: list[str], directory: Path, name: str, faults: list[str]) -> int:
    """Run a command until it is done, again after a lost driver; return the number of starts. Raises BenchmarkError."""
    line = [sys.executable, "-m", "hybridflow", *command, *SETTINGS, f"trainer.run_dir={directory}/{name}"]
    line += [f"faults.plan={json.dumps(faults)}"] if faults else []
    for start in range(1, MOST_STARTS + 1):
        with (directory / f"{name}.txt").open("ab") as output:
            process = subprocess.Popen(line, stdout=output, stderr=output)
            try:
                status = process.wait(TIMEOUT_S)
            except BaseException:
                process.kill()
                process.wait()
                raise
        if status == 0:
            return start
        if status not in AGAIN:
            break
    end = (directory / f"{name}.txt").read_text(errors="replace")[-3000:]
    raise BenchmarkError(f"'{name}' exited with status {status} at start {start}, faults {faults}: {end}")


def differences(directory: Path, like: str, name: str) -> list[str]:
    """Return the names of the results in which two runs differ."""
    one, other = (results_of(directory / each) for each in (like, name))
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def results_of(path: Path) -> dict[str, Any]:
    """Return weights, optimizer, samples and metrics of a run; new processes get the weights once more."""
    results = tiny_run.results_of(path, STEPS)
    rows = [{name: row[name] for name in row if "weight_sync/" not in name} for row in results["metrics"]]
    return {**results, "metrics": rows}


if __name__ == "__main__":
    run(main)
