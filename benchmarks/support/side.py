"""The parent's half of the protocol: one side of a comparison, a program that waits in its own process."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from support.environments import BENCHMARKS, ROOT, VARIABLES, python_of
from support.errors import BenchmarkError

SECONDS_TO_END = 30
SECONDS_TO_END_AFTER_ERROR = 5
LOG_LINES_SHOWN = 30


class Side:
    """`system` computing in `dtype`: the program `sides/SYSTEM_TASK.py`, started with `options`.

    It runs in `directory`, which also receives its log, and computes with `threads` threads; BenchmarkError is raised
    if it reports another number. `versions` are those of its packages. It leads its own process group, so that a
    terminal's Ctrl-C reaches only the parent, which then ends the side and every process that the side started.
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
                    start_new_session=True,
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
            self.close(after_error=True)
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request and return the reply. Raises BenchmarkError with the end of its log if the side exited."""
        assert self._process.stdin is not None, "the process was started with a pipe"
        with suppress(BrokenPipeError):  # it exited while idle; reading reports that
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def close(self, *, after_error: bool = False) -> None:
        """End the side and the processes that it started.

        An idle side exits when its requests end. After an error it may be busy: SIGINT interrupts its request.
        """
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        if after_error:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(SECONDS_TO_END_AFTER_ERROR if after_error else SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            pass
        finally:  # a second Ctrl-C ends the waiting
            self._process.kill()
            self._process.wait()
            with suppress(ProcessLookupError):  # not SIGKILL: the reaper of a Ray cluster must finish its work
                os.killpg(self._process.pid, signal.SIGTERM)
            self._replies.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.close(after_error=error is not None)

    def _read(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            log = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
            raise BenchmarkError(f"{self.name} exited before it replied. The end of its log:\n{log}")
        return json.loads(line)


def _variables(system: str, threads: int) -> dict[str, str]:
    """Return the parent's environment variables, those that make sides comparable, and those that stop downloads."""
    return {
        **os.environ,
        # The measured commit, not an installed one; then packages that the machine has elsewhere.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(BENCHMARKS), str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),  # for peers too
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **VARIABLES.get(system, {}),
    }
