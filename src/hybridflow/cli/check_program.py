"""A check of `hybridflow doctor` that is a program of its own, and the result of any check."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

LIMIT_S = 120.0
"""Seconds after which a program counts as hanging; a first start on a slow machine compiles its imports."""

MOST_CHARS = 300
"""Characters of the last line of a program that failed."""


class CheckResult(NamedTuple):
    """The result of a check. `text`: what was seen; `fix`: what to do, empty if `state` is "ok".

    "warning": runs work, but not all of them, or slowly. "error": no run works, or none of some kind.
    """

    name: str
    state: Literal["ok", "warning", "error"]
    text: str
    fix: str = ""


class CheckProgram:
    """A Python program that must end with status 0 within `limit_s` seconds; it runs in a directory of its own.

    Without `done`, its last line is its finding.
    """

    def __init__(
        self, name: str, arguments: list[str], scratch: Path, fix: str, done: str = "", limit_s: float = LIMIT_S
    ) -> None:
        self._name, self._fix, self._done, self._limit_s = name, fix, done, limit_s
        directory = scratch / name.replace(" ", "_")
        directory.mkdir()
        self._output, self._start = directory / "output.txt", time.monotonic()
        with open(self._output, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *arguments],
                cwd=directory,
                env={**os.environ, "TMPDIR": str(directory)},  # what is left there is removed with it
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finding(self) -> CheckResult:
        """Wait for the program and return what came of it."""
        try:
            status = self._process.wait(max(0.0, self._start + self._limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return self._failed(f"it had not ended after {self._limit_s:.0f} s")
        if status:
            return self._failed(f"it ended with status {status}")
        if not self._done:
            return CheckResult(*json.loads(self._last_line()))
        return CheckResult(self._name, "ok", f"{self._done}, {time.monotonic() - self._start:.0f} s")

    def _failed(self, text: str) -> CheckResult:
        self.stop()
        line = self._last_line()[:MOST_CHARS]
        return CheckResult(self._name, "error", f"{text}: {line}" if line else text, self._fix)

    def _last_line(self) -> str:
        lines = self._output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def stop(self) -> None:
        """Kill the program if it still runs, with the processes that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # its session, which is its own
            self._process.wait()
