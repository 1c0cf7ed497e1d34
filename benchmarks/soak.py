"""Clean shutdown: start and stop clusters many times, some by SIGKILL to the driver, and count leftovers.

    make soak                                  50 cycles, 10 of them killed
    .venv/bin/python benchmarks/soak.py --cycles 5 --killed 1

Each cycle starts a new cluster on this machine with a worker group, makes calls, and stops. Counted before and after:
processes that carry this program's mark, files of /dev/shm that no process has open, entries of a private temporary
directory, and sockets and other open files of the process that starts most of the clusters (Ray leaks one or two
sockets there per cluster). Exits with status 1 if any other count grew. Other clusters may run at the same time.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.arguments import parser_of
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, print_rows

from hybridflow.controller.ray.reaper import is_open, own_processes

DRIVER = """
import contextlib, os, sys, time
import torch
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend
from hybridflow.protocol import DataProto


class Doubler(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("doubled",))
    def double(self, batch):
        return DataProto.from_dict({"doubled": batch.batch["x"] * 2})


def cycle():
    with RayBackend(num_cpus=1, object_store_bytes=100 * 2**20) as backend:
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Doubler), backend)
        batch = DataProto.from_dict({"x": torch.ones(4, 100_000)})
        futures = [group.double.remote(batch) for _ in range(3)]
        assert float(futures[-1].get("doubled").batch["doubled"].sum()) == 800_000
        if sys.argv[1] == "killed":
            print("ready", flush=True)
            time.sleep(600)


def count_descriptors():
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            kinds.append(os.readlink(f"/proc/self/fd/{name}").startswith("socket:"))
    return kinds.count(True), kinds.count(False)


def settled_descriptors(seconds):
    "Return sockets and other descriptors once they are unchanged for some seconds: some are closed late."
    counts = []
    for _ in range(300):
        counts.append(count_descriptors())
        if len(counts) > 10 * seconds and len(set(counts[-10 * seconds :])) == 1:
            break
        time.sleep(0.1)
    return counts[-1]


def wait_for_descriptors(limits, seconds):
    "Return the counts as soon as they are within the limits, or after some seconds: Ray closes sockets late."
    deadline = time.monotonic() + seconds
    while True:
        counts = count_descriptors()
        if all(count <= limit for count, limit in zip(counts, limits)) or time.monotonic() > deadline:
            return counts
        time.sleep(0.1)


if sys.argv[1] == "killed":
    cycle()
cycle()  # opens the descriptors that stay open for the life of the process
before = settled_descriptors(2)
for index in range(int(sys.argv[2])):
    cycle()
    print("cycle", flush=True)
limits = [count + int(growth) * int(sys.argv[2]) for count, growth in zip(before, sys.argv[3:])]
print("descriptors", *before, *wait_for_descriptors(limits, 120), flush=True)
"""

MAY_GROW_BY = {"sockets of driver": 2, "files of driver": 0}
"""Allowed growth per cycle after the first; Ray leaves one or two sockets open."""
MARK = "HYBRIDFLOW_SOAK"
"""The environment variable that every process started here inherits."""


def main() -> int:
    parser = parser_of(__doc__, None, smoke={"cycles": 3, "killed": 1})
    parser.add_argument("--cycles", type=int, default=50, help="clusters to start (default: 50)")
    parser.add_argument("--killed", type=int, default=10, help="cycles ended by SIGKILL to the driver (default: 10)")
    arguments = parser.parse_args()
    if not 0 <= arguments.killed <= arguments.cycles:
        parser.error(f"--killed {arguments.killed} is invalid: expected 0 to {arguments.cycles}, the number of cycles.")
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as directory:  # a short path, because sockets are in it
        os.environ.update({MARK: secrets.token_hex(8), "TMPDIR": directory})
        return soak(arguments.cycles, arguments.killed, arguments.smoke)


def soak(cycles: int, killed: int, smoke: bool) -> int:
    """Run all cycles, print the counts and return the exit status."""
    in_order = cycles - killed
    before = count_all()
    start = time.monotonic()
    first, last = run_in_order(in_order)
    for index in range(killed):
        run_and_kill()
        print(f"killed {index + 1} of {killed}", file=sys.stderr, flush=True)
    after = wait_for(before)
    print(f"{'':<24}{'before':>10}{'after':>10}")
    for name in before:
        print(f"{name:<24}{before[name]:>10}{after[name]:>10}")
    for name in first:
        print(f"{name:<24}{first[name]:>10}{last[name]:>10}")
    print(f"{cycles} cycles, {killed} killed, in {time.monotonic() - start:.0f} s")
    grew = [name for name in before if after[name] > before[name]]
    grew += [name for name in first if last[name] - first[name] > MAY_GROW_BY[name] * (in_order - 1)]
    if grew:
        print(f"grew: {', '.join(grew)}", file=sys.stderr)
    rows = [Row(name.replace(" ", "_"), "count", after[name] - before[name], limit=0) for name in before]
    print_rows("soak", rows, smoke=smoke)
    return 1 if grew else 0


def count_all() -> dict[str, int]:
    """Return the number of each kind of leftover by name."""
    return {
        "processes": sum(1 for pid in own_processes() if pid != os.getpid() and carries_mark(pid)),
        "/dev/shm": sum(1 for path in Path("/dev/shm").iterdir() if is_unused(path)),
        "temporary directory": len(os.listdir(os.environ["TMPDIR"])),
    }


def carries_mark(pid: int) -> bool:
    """Return whether a process was started by this program."""
    try:
        return f"{MARK}={os.environ[MARK]}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def is_unused(path: Path) -> bool:
    """Return whether a file exists that no process has open."""
    try:
        return not is_open(path.stat())
    except OSError:  # removed meanwhile
        return False


def wait_for(before: dict[str, int], timeout_s: float = 30.0) -> dict[str, int]:
    """Return the counts as soon as none is larger than before, or after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        after = count_all()
        if all(after[name] <= before[name] for name in before) or time.monotonic() > deadline:
            return after
        time.sleep(0.2)


def run_in_order(cycles: int) -> tuple[dict[str, int], dict[str, int]]:
    """Run cycles that end normally in one process; return its descriptors after the first and after the last."""
    if not cycles:
        return {}, {}
    command = [sys.executable, "-c", DRIVER, "in order", str(cycles - 1), *map(str, MAY_GROW_BY.values())]
    with driver(command) as process:
        assert process.stdout is not None
        counts, done = [0, 0, 0, 0], 1
        for line in process.stdout:
            if line.startswith("cycle"):
                done += 1
                print(f"cycle {done} of {cycles}", file=sys.stderr, flush=True)
            elif line.startswith("descriptors"):
                counts = [int(word) for word in line.split()[1:]]
    if process.returncode:
        raise BenchmarkError(f"the driver exited with status {process.returncode}; its error is above.")
    names = list(MAY_GROW_BY)
    return dict(zip(names, counts[:2], strict=True)), dict(zip(names, counts[2:], strict=True))


def run_and_kill() -> None:
    """Run a cycle whose driver receives SIGKILL while its cluster is up."""
    with driver([sys.executable, "-c", DRIVER, "killed"]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                break
        process.send_signal(signal.SIGKILL)


@contextmanager
def driver(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a driver, and kill it if the block raises, as on Ctrl-C; the reaper then removes its cluster."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


if __name__ == "__main__":
    run(main)
