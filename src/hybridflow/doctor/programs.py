"""Programs in processes of their own: each check, an all-reduce of two processes, and steps of training."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from hybridflow.doctor.finding import Finding
from hybridflow.doctor.tiny_step import LOCAL_DONE

LIMIT_S = 120.0
"""Seconds after which a program counts as hanging; a first start on a slow machine compiles all that it imports."""

CHECK_LIMIT_S = 60.0
"""The same for a check of one question."""

PYTHON = (sys.executable, "-P")
"""The interpreter, without the working directory among the places that it imports from."""

POLL_S = 0.02

MOST_CHARS = 300
"""Characters of the last line of a program that failed."""

ALL_REDUCE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
value = torch.ones(1000) * (int(sys.argv[2]) + 1)
dist.all_reduce(value)
assert value.tolist() == [3.0] * 1000, value
dist.destroy_process_group()  # an interpreter that ends first may abort on the threads of the group
"""


class Program:
    """Processes that must all end with status 0 within `limit_s` seconds; their output is in files of `directory`."""

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        directory: Path,
        done: str,
        fix: str,
        limit_s: float = LIMIT_S,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._name, self._done, self._fix, self._limit_s = name, done, fix, limit_s
        self._start, self._processes, self._outputs = time.monotonic(), [], []
        for i, command in enumerate(commands):
            output = directory / f"output_{i}.txt"
            self._outputs.append(output)
            with open(output, "wb") as file:
                process = subprocess.Popen(
                    command,
                    cwd=directory,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._processes.append(process)

    def finding(self) -> Finding:
        """Wait for the processes and return what came of them."""
        while any(process.poll() is None for process in self._processes):
            if self._seconds() > self._limit_s or any(process.poll() for process in self._processes):
                break
            time.sleep(POLL_S)
        for process, output in zip(self._processes, self._outputs, strict=True):
            if status := process.poll():
                return self._failed(f"it ended with status {status}{_last_line(output)}")
        for process, output in zip(self._processes, self._outputs, strict=True):
            if process.poll() is None:
                return self._failed(f"it had not ended after {self._limit_s:.0f} s{_last_line(output)}")
        return self._ended()

    def reached(self, file: Path) -> bool:
        """Wait until the processes have written a file; return False if they ended or hang without it."""
        while not file.exists():
            if self._seconds() > self._limit_s or all(process.poll() is not None for process in self._processes):
                return file.exists()
            time.sleep(POLL_S)
        return True

    def _ended(self) -> Finding:
        """Return the finding once all processes have ended with status 0."""
        return Finding(self._name, "ok", f"{self._done}, {self._seconds():.0f} s")

    def _failed(self, text: str) -> Finding:
        self.stop()
        return Finding(self._name, "error", text, self._fix)

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def stop(self) -> None:
        """Kill what still runs, with the processes that it started."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its session, which is its own
                process.wait()


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {lines[-1][:MOST_CHARS]}" if lines else ""


class Check(Program):
    """A check of one question, whose process prints its finding."""

    def _ended(self) -> Finding:
        return Finding(*json.loads(self._outputs[0].read_text(encoding="utf-8").splitlines()[-1]))


def check(name: str, run_directory: Path, directory: Path) -> Program:
    """Start the check of this name."""
    command = [*PYTHON, "-m", "hybridflow.doctor.one_check", name, str(run_directory)]
    fix = "see what the last line says; `python -X faulthandler -c 'import torch'` shows where an import hangs"
    return Check(name, [command], directory, "", fix, limit_s=CHECK_LIMIT_S)


def all_reduce(directory: Path) -> Program:
    """Start the sum of a tensor over two processes on gloo."""
    commands = [[*PYTHON, "-c", ALL_REDUCE, str(directory / "store"), str(rank)] for rank in (0, 1)]
    fix = (
        "set GLOO_SOCKET_IFNAME to an interface of this machine, such as lo or eth0, and see the line on the host name"
    )
    return Program("all-reduce", commands, directory, "two processes added a tensor by gloo", fix)


class Steps(Program):
    """A step of GRPO on a tiny model, locally and then on Ray: data, generation, a reward, an update, a checkpoint."""

    def __init__(self, directory: Path) -> None:
        command = [*PYTHON, "-m", "hybridflow.doctor.tiny_step", str(directory)]
        fix = "read the error, and docs/ray.md; until it is mended, use controller.backend = 'local'"
        done = "one step of GRPO on a tiny model"
        # a rank that ends while its reward processes start leaves their directories
        super().__init__("a step on Ray", [command], directory, done, fix, variables={"TMPDIR": str(directory)})
        self._local_done = directory / LOCAL_DONE

    def findings(self) -> Iterator[Finding]:
        """Yield what came of the local step, and of that on Ray, unless the first failed."""
        if self.reached(self._local_done):
            yield self._ended()._replace(name="a step")
            yield self.finding()
        else:
            fix = "read the error; `hybridflow train` cannot work here before it is mended"
            yield self.finding()._replace(name="a step", fix=fix)
