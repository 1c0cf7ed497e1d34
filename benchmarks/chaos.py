"""Runs into which faults are injected: are their results those of undisturbed runs, bit for bit?

A tiny model trains on Ray with two training ranks and two rollout engines, by GRPO, by PPO, and with `trainer.lag`,
where batches have begun whenever a process is lost. Each disturbed run gets some faults, drawn with `--seed`:
processes that are killed or stopped, delays, weights changed in transit, full disks. Lost workers are replaced inside
the run. If the driver is killed, or a checkpoint finds no space, the same command runs again. With `--kills`, further
runs lose their driver, a service of their Ray cluster or a reward process, at random moments from the begin of the
command to its end, and the same command runs again if it has ended. At the end weights, optimizer, samples and
metrics (without times, memory, transfers and recoveries) are compared with those of the undisturbed run. Exits with
status 1 if one differs, if a run does not come to its end, or if a killed driver leaves a process.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from support.arguments import parser_of
from support.environments import ROOT
from support.errors import BenchmarkError
from support.faults import DRIVER, PHASES, Fault, fired_faults, kinds_at, phases_of, plan_faults, workers_of
from support.program import run
from support.report import Row, print_rows, print_table

from hybridflow.config import Config, load_config
from hybridflow.runtime.fault_points import FAULTS_VARIABLE
from hybridflow.runtime.observe import read_jsonl

sys.path.append(str(ROOT / "tests"))
sys.path.append(str(ROOT / "examples"))
from fixtures import tiny_run

STEPS = 6
FAULTS_OF_RUN = 5
AGAIN = (75, -signal.SIGKILL)
"""Exit statuses after which the same command goes on."""
DURING_START = 1
"""Exit status with which Ray's client ends the driver if a service dies while it connects."""
MOST_STARTS = 12
TIMEOUT_S = 900.0
REWARD = "reward"
"""Program of `entry_point.py`."""
VICTIMS = ("driver", "driver", "driver", "raylet", "gcs_server", REWARD)
"""Processes to kill, in turn."""
END_TIMEOUT_S = 60.0
"""Seconds within which nothing is left of a killed driver."""
SETTINGS = (
    *("controller.backend=ray", "controller.cpus_per_worker=0.5", "controller.object_store_bytes=100000000"),
    *("placement.pools={learn=[2],generate=[2]}", "placement.roles.rollout=generate"),
    *("controller.heartbeat_timeout_s=8", "recovery.max_restarts=10", "recovery.backoff_s=0.1"),
    *("trainer.save_every=2", f"trainer.total_steps={STEPS}"),
)


def main() -> int:
    parser = parser_of(__doc__, None, smoke={"faults": 5, "kills": 1})
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="faults in all (default: 100)")
    parser.add_argument(
        "--kills", type=int, default=0, metavar="N", help="drivers, services and reward processes to kill (default: 0)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the faults (default: 1)")
    args = parser.parse_args()
    if args.faults < 0 or args.kills < 0:
        parser.error(f"--faults={args.faults} and --kills={args.kills} must not be negative")
    with tempfile.TemporaryDirectory() as folder:
        directory = tiny_run.write_task(Path(folder))
        commands = tiny_run.commands(directory)
        commands["lag"] = [*commands["grpo"], "trainer.lag=2", "algorithm.rollout_weights=token"]
        if args.smoke:
            del commands["ppo"]
        chaos = Chaos(directory, commands, random.Random(args.seed))
        seconds = chaos.undisturbed()
        chaos.inject(args.faults)
        chaos.kill(args.kills, seconds)
    kinds = sorted({kind for _, kind in chaos.fired})
    table = [[phase, *(str(chaos.fired[phase, kind] or "-") for kind in kinds)] for phase in PHASES]
    print_table("faults that fired, by phase and kind", ["phase", *kinds], table)
    table = [[kind, str(len(times)), *medians(times)] for kind, times in sorted(chaos.times.items())]
    heads = ["kind", "count", "seconds until noticed", "seconds until it goes on"]
    if table:  # of runs whose driver was not killed in between
        print_table("recoveries from one fault", heads, table)
    rows = [
        Row("faults", "count", sum(chaos.fired.values())),
        *(Row(f"killed_{victim}", "count", chaos.killed[victim]) for victim in dict.fromkeys(VICTIMS)),
        Row("lost_runs", "count", chaos.lost, limit=0),
        Row("differing_results", "count", chaos.different, limit=0),
        Row("left_processes", "count", chaos.left, limit=0),
    ]
    print_rows("chaos", rows, smoke=args.smoke)
    return 1 if chaos.lost or chaos.different or chaos.left else 0


class Chaos:
    """The runs in one directory, and what happened to them."""

    def __init__(self, directory: Path, commands: dict[str, list[str]], chance: random.Random) -> None:
        self._directory, self._commands, self._chance = directory, commands, chance
        self._names = list(commands)
        self.fired: Counter[tuple[str, str]] = Counter()
        self.times: dict[str, list[tuple[float, float]]] = {}
        """By kind of fault, for each recovery from a single one: seconds until it was noticed, and from then on."""
        self.killed: Counter[str] = Counter()
        self.lost = self.different = self.left = 0

    def undisturbed(self) -> float:
        """Make the runs to compare with; return the seconds of the last one."""
        seconds = 0.0
        for name in self._names:
            start = time.monotonic()
            self._train(name, name, [])
            seconds = time.monotonic() - start
        return seconds

    def inject(self, faults: int) -> None:
        """Inject faults, `FAULTS_OF_RUN` into each run."""
        for index in range(-(-faults // FAULTS_OF_RUN)):
            like, name = self._names[index % len(self._names)], f"disturbed_{index}"
            config = load_config(self._directory / "rl.toml", [*self._commands[like][2:], *SETTINGS])
            plan = drawn(config, self._chance, min(FAULTS_OF_RUN, faults - index * FAULTS_OF_RUN))
            self._compare(like, name, partial(self._train, like, name, plan), plan)

    def kill(self, kills: int, seconds: float) -> None:
        """Kill drivers and services at moments from 0 to `seconds` after the start of their command."""
        index = 0
        while sum(self.killed.values()) < kills:
            like, name = self._names[index % len(self._names)], f"killed_{index}"
            most = kills - sum(self.killed.values())
            self._compare(
                like, name, lambda like=like, name=name, most=most: self._kill_often(like, name, seconds, most)
            )
            index += 1

    def _compare(self, like: str, name: str, train: Callable[[], str], plan: list[str] | None = None) -> None:
        """Compare the results of `train()` with those of an undisturbed run, and report."""
        try:
            report = train()
        except BenchmarkError as error:
            self.lost += 1
            print(f"{name} ({like}) is lost: {error}", file=sys.stderr, flush=True)
            return
        one, other = (results_of(self._directory / each) for each in (like, name))
        found = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        self.different += len(found)
        if plan:
            rows = fired_faults(self._directory / name)
            self.fired.update((row["phase"], row["kind"]) for row in rows)
            if (recoveries := self._directory / name / "recoveries.jsonl").exists():
                self._note_times(rows, read_jsonl(recoveries))
            report = f"{len(rows)} of {len(plan)} faults fired, {report}"
        state = f"differs in {', '.join(found)}" if found else "equal"
        print(f"{name} ({like}): {report}, {state}", file=sys.stderr, flush=True)

    def _note_times(self, fired: list[dict[str, Any]], recoveries: list[dict[str, Any]]) -> None:
        """Note the times of recoveries before which exactly one fault fired since the recovery before it."""
        before = 0.0
        for row in recoveries:
            own = [fault for fault in fired if before < fault["time"] <= row["time"] and fault["kind"] != "delay"]
            if len(own) == len(row["errors"]) == 1:
                times = self.times.setdefault(own[0]["kind"], [])
                times.append((row["time"] - own[0]["time"], row["seconds"]))
            before = row["time"] + row["seconds"]

    def _train(self, like: str, name: str, plan: list[str]) -> str:
        """Run a command until it is done, again after a lost driver; return a report. Raises BenchmarkError."""
        for start in range(1, MOST_STARTS + 1):
            process = self._start(like, name, plan)
            status = ended(process)
            if status == 0:
                return f"{start} starts"
            if status not in AGAIN:
                break
        raise BenchmarkError(f"status {status} at start {start}, faults {plan}: {self._end_of_output(name)}")

    def _kill_often(self, like: str, name: str, seconds: float, most: int) -> str:
        """Run a command until it is done; kill its driver or a service at random moments, at most `most` times."""
        done, kills, status = False, Counter[str](), 0
        while not done:
            process = self._start(like, name, [])
            if sum(kills.values()) < most:
                victim = VICTIMS[sum((self.killed + kills).values()) % len(VICTIMS)]
                try:
                    process.wait(seconds * self._chance.random())
                except subprocess.TimeoutExpired:
                    family = psutil.Process(process.pid).children(recursive=True)
                    if victim == "driver":
                        process.kill()
                        kills[victim] += 1
                    for service in family:  # none before the cluster has started
                        if victim != "driver" and name_of(service) == victim:
                            service.kill()
                            kills[victim] += 1
                            if victim == REWARD:
                                break
                    ended(process)
                    self.left += len(psutil.wait_procs(family, END_TIMEOUT_S)[1])
            status = ended(process)
            if status not in (0, *AGAIN, DURING_START if kills.keys() - {"driver"} else 0):
                raise BenchmarkError(f"status {status} after kills {dict(kills)}: {self._end_of_output(name)}")
            done = status == 0
        self.killed += kills
        return ", ".join(f"{count} times {victim}" for victim, count in kills.items()) or "nothing killed"

    def _start(self, like: str, name: str, plan: list[str]) -> "subprocess.Popen[bytes]":
        run_dir = self._directory / name
        line = [sys.executable, "-m", "hybridflow", *self._commands[like], *SETTINGS, f"trainer.run_dir={run_dir}"]
        environment = dict(os.environ)
        if plan:
            next_step = 1 + max((int(path.name[-6:]) for path in run_dir.glob("checkpoints/step_*[0-9]")), default=0)
            environment[FAULTS_VARIABLE] = plan_faults(run_dir, plan, next_step, delay_s=1.0)
        with (self._directory / f"{name}.txt").open("ab") as output:
            return subprocess.Popen(line, stdout=output, stderr=output, env=environment)

    def _end_of_output(self, name: str) -> str:
        return (self._directory / f"{name}.txt").read_text(errors="replace")[-3000:]


def medians(times: list[tuple[float, float]]) -> list[str]:
    """Return the median and the largest value of each column, as text."""
    return [f"{statistics.median(column):.1f} (at most {max(column):.1f})" for column in zip(*times, strict=True)]


def ended(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a process and return its status; it is killed if the wait fails. Raises BenchmarkError after a while."""
    try:
        return process.wait(TIMEOUT_S)
    except BaseException as error:
        process.kill()
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BenchmarkError(f"a run has not ended after {TIMEOUT_S:g} s") from error
        raise


def name_of(process: psutil.Process) -> str:
    """Return the name of a process, `REWARD` for one that runs a reward function; "" if it has ended."""
    try:
        return REWARD if process.cmdline()[-1:] == [REWARD] else process.name()
    except psutil.NoSuchProcess:
        return ""


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


def results_of(path: Path) -> dict[str, Any]:
    """Return weights, optimizer, samples and metrics of a run; new processes get the weights once more."""
    results = tiny_run.results_of(path, STEPS)
    rows = [{name: row[name] for name in row if "weight_sync/" not in name} for row in results["metrics"]]
    return {**results, "metrics": rows}


if __name__ == "__main__":
    run(main)
