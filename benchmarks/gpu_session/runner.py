"""Runs the processes of a session one after another; none can take the others down.

A process is forked from this one, which has imported torch and has not touched the GPU: milliseconds in place of the
seconds of a start (`start_method`). It has a limit of time. If it hangs, dies or raises, a line says so, and the next
one runs.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from gpu_session.record import Record, Teller

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent has ended."""


@dataclass(frozen=True)
class Case:
    """A process of a part: it calls `measure(teller, **options)`, and is killed after `limit_s` seconds.

    With less time than `least_s` it is not worth its start.
    """

    part: str
    name: str
    limit_s: float
    measure: Callable[..., None]
    options: dict[str, Any] = field(default_factory=dict)
    least_s: float = 8

    @property
    def key(self) -> tuple[str, str]:
        """What identifies it in the file of figures."""
        return self.part, self.name


def start_method() -> str | None:
    """Return how a process that uses the GPU starts: "fork", or "spawn" if CUDA has started here; None without one.

    This process does not ask itself: one that is forked from it afterwards could not use the GPU.
    """
    if torch.version.cuda is None:
        return None
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=_touch_gpu)
        process.start()
        process.join()
        if process.exitcode == 0:
            return method
    return None


def _touch_gpu() -> None:
    with suppress(Exception):
        raise SystemExit(not torch.ones(1, device="cuda").item())
    raise SystemExit(1)


def run_cases(cases: Sequence[Case], record: Record, *, budget_s: float = float("inf"), start_by: str = "fork") -> None:
    """Run the cases in order; those for which no time of `budget_s` is left are named in the record."""
    start = time.monotonic()
    for number, case in enumerate(cases, 1):
        passed_s = time.monotonic() - start
        left_s = budget_s - passed_s
        if left_s < case.least_s:
            record.write(*case.key, state="not run: too little time is left")
            continue
        print(f"[{number}/{len(cases)}, {passed_s:.0f} s] {case.part} of {case.name}", file=sys.stderr, flush=True)
        before_s = time.monotonic()
        state = run_case(case, record, min(case.limit_s, left_s), start_by)
        record.write(*case.key, state=state, seconds=round(time.monotonic() - before_s, 1))


def run_case(case: Case, record: Record, limit_s: float, start_by: str) -> str:
    """Run one case in a process; return "done", or how it ended otherwise."""
    process = multiprocessing.get_context(start_by).Process(target=_measure, args=(case, record))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries, which wait while no one computes
        process.start()
    try:
        process.join(limit_s)
        code = process.exitcode
        if code is None:
            return f"stopped after {limit_s:.0f} s"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return "done" if code == 0 else "failed: its error is in the line before"
    finally:
        _end(process)


def _end(process: Any) -> None:
    """Kill a process with all that it started, also what has a process group of its own, and wait until it is gone."""
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    with suppress(ProcessLookupError):  # what outlived a process that ended
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()
    psutil.wait_procs(children, timeout=5)  # the next process needs the memory of the GPU


def _measure(case: Case, record: Record) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also if the session is killed
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, signal.SIG_DFL)
    os.dup2(2, 1)  # the last line of stdout is the parent's
    try:
        case.measure(Teller(record, *case.key), **case.options)
    except BaseException as error:
        traceback.print_exc()
        record.write(*case.key, error=f"{type(error).__name__}: {error}"[:500])
        raise SystemExit(1) from None
