"""The parent's half of the protocol: one side of a comparison, a program that waits in a process of its own."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from support.environments import BENCHMARKS, VARIABLES, python_of
from support.errors import BenchmarkError

SECONDS_TO_END = 30
LOG_LINES_SHOWN = 30


class Side:
    """`system` computing in `dtype`; the program is `sides/SYSTEM_TASK.py`, started with `options`.

    It runs in `directory`, where its log goes as well, and computes with `threads` threads: it says so when it is
    ready, and BenchmarkError is raised if it is another number. `versions`: of its packages.
    """

    def __init__(
        self, system: str, dtype: str, *, task: str, threads: int, directory: Path, make_target: str, **options: Any
    ) -> None:
        self.system, self.dtype = system, dtype
        self.name = f"{system} {dtype}"
        self._log = directory / f"{system}_{dtype}_{task}.log"
        python = python_of(system, make_target)
        read_end, write_end = os.pipe()
        self._replies = os.fdopen(read_end)
        try:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [
                        *(str(python), "-m", f"sides.{system}_{task}", str(write_end)),
                        json.dumps({"dtype": dtype, "threads": threads, **options}),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    cwd=directory,
                    env=_variables(system, threads),
                    pass_fds=[write_end],
                )
        finally:
            os.close(write_end)
        try:
            greeting = self._read()
            self.versions: dict[str, str] = greeting["versions"]
            used = greeting["threads"]
            if used != threads:
                raise BenchmarkError(
                    f"{self.name} computes with {used} threads, the other sides with {threads}; "
                    "unset the environment variables that set its threads."
                )
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request, wait for the reply. Raises BenchmarkError with the end of its log if the side died."""
        assert self._process.stdin is not None, "the process was started with a pipe"
        with suppress(BrokenPipeError):  # it died while idle; reading says so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the process: it ends by itself when it sees that nothing more will be asked."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            log = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
            raise BenchmarkError(f"{self.name} ended before it replied. The end of its log:\n{log}")
        return json.loads(line)


def _variables(system: str, threads: int) -> dict[str, str]:
    """The parent's environment variables, and what makes sides comparable and keeps them off the network."""
    return {
        **os.environ,
        "PYTHONPATH": str(BENCHMARKS),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **VARIABLES.get(system, {}),
    }
