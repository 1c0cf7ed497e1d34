"""The short runs of a certificate: commands of `hybridflow` in processes of their own, in a scratch directory."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hybridflow.checkpoint import CheckpointStore
from hybridflow.errors import HybridFlowError
from hybridflow.trainers.certify.equality import Equality
from hybridflow.trainers.certify.kill import Kill
from hybridflow.trainers.run.run_states import copy_journals

POLL_S = 0.05
END_S = 30.0
"""Seconds in which an interrupted run may end by itself."""

USAGE = 2
"""The exit status of a command whose configuration is not possible."""


class NotCheckedError(Exception):
    """The reason why a comparison cannot be made here."""


class ShortRunError(HybridFlowError):
    """An error that ended a run of a certificate; `status` is that of its command, `reason` its last message."""

    def __init__(self, name: str, status: int, log: Path) -> None:
        lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
        self.status, self.reason = status, "\n".join(lines[errors[-1] :] if errors else lines[-5:])
        self.reason = self.reason.removeprefix("error: ")
        if status < 0:
            self.reason = (
                f"{signal.Signals(-status).name} from outside, as where memory is short. {self.reason}".strip()
            )
        super().__init__(f"{name} ended with status {status}: {self.reason}")


@dataclass(frozen=True)
class ShortRuns:
    """Runs of `arguments`, a recipe and overrides, to `num_steps` in `scratch`; `say` gets a line for each step."""

    arguments: Sequence[str]
    scratch: Path
    num_steps: int
    middle: int
    say: Callable[[str], None]

    def train(self, name: str, *changes: str, run: Path | None = None, kill: Kill | None = None) -> Path:
        """Train in a directory, by default a new one, and return it. Raises ShortRunError.

        With a `kill` of the driver, the run is started, killed, and not started again. Raises NotCheckedError if
        `changes` of the recipe are not possible.
        """
        run = run or self.scratch / name.replace(" ", "_")
        command = ["train", *self.arguments, *changes, f"trainer.run_dir={run}", "--stop-after", str(self.num_steps)]
        try:
            self._run(name, ["hybridflow", *command], run, kill)
        except ShortRunError as error:
            raise (NotCheckedError(error.reason) if changes and error.status == USAGE else error) from None
        return run

    def check(self, what: str, run: Path) -> dict[str, Equality]:
        """Return the comparisons that a function of `in_process` makes of a run, in a process of its own."""
        result = self.scratch / f"{what}.json"
        self._run(what, ["hybridflow.trainers.certify.in_process", what, str(run), str(result)])
        found = json.loads(result.read_text("utf-8"))
        return {name: Equality(**each) for name, each in found.items()}

    def copy(self, run: Path, name: str, *, with_checkpoint: bool = True) -> Path:
        """Copy a run as it was at its checkpoint in the middle; without that, only its journals."""
        copied = self.scratch / name.replace(" ", "_")
        copied.mkdir()
        copy_journals(run, copied)
        if with_checkpoint:
            for path in run.iterdir():
                if path.is_file() and path.name != ".lock":
                    shutil.copy2(path, copied)
            ours, theirs = (CheckpointStore(each / "checkpoints").path(self.middle) for each in (run, copied))
            shutil.copytree(ours, theirs)
        return copied

    def _run(self, name: str, module: list[str], run: Path | None = None, kill: Kill | None = None) -> None:
        """Run a module until it ends or is killed, and say the steps of the run that it makes. Raises ShortRunError."""
        start, shown = time.monotonic(), _num_steps(run)
        log = self.scratch / f"{name.replace(' ', '_')}.log"
        killed = kill if kill and kill.whom == "driver" else None
        self.say(f"{name} ...")
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *module],
                env=os.environ | (kill.environment() if kill else {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the run
            )
            try:
                while process.poll() is None:
                    time.sleep(POLL_S)
                    if killed and killed.reached.exists():
                        process.kill()
                    if (count := _num_steps(run)) > shown:
                        self.say(f"{name}: step {count} of {self.num_steps}, {time.monotonic() - start:.0f} s")
                    shown = count
            except BaseException:
                _end(process)
                raise
        if process.returncode != (-signal.SIGKILL if killed and killed.reached.exists() else 0):
            raise ShortRunError(name, process.returncode, log)


def _num_steps(run: Path | None) -> int:
    file = run and run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file and file.is_file() else 0


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a run at once: the second SIGTERM does not wait for the end of its step."""
    for _ in range(2):
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    process.kill()
    process.wait()
