"""Named places in the code at which the process injects a planned fault into itself (`faults.plan`).

RUN_DIR/faults.json    the faults, as the driver planned them at its start
RUN_DIR/faults/step    the step of the run, which the driver writes; other processes read it at a fault point
RUN_DIR/faults/fired   a file for each fault that fired, created before it fires: each fires once, also after a restart
RUN_DIR/faults/fired.jsonl

Without a plan, a fault point costs the read of a global variable.
"""

import errno
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hybridflow.config import Config
from hybridflow.config.faults import DRIVER, Fault
from hybridflow.runtime.atomic_files import fsync_path, write_text_atomically

logger = logging.getLogger(__name__)

PLAN, DIRECTORY = "faults.json", "faults"

current_worker: ContextVar[str] = ContextVar("current_worker", default=DRIVER)
"""The worker whose constructor or method runs, as in `critic/0`; a backend sets it for the time of a call."""


def fault_point(phase: str, corrupt: Callable[[], None] | None = None) -> None:
    """Inject the planned fault of the current worker in this phase, if there is one.

    `corrupt` flips a bit, for a fault of kind "corrupt"; without it, such a fault waits for the next fault point.
    """
    if _armed is not None:
        _armed.fire(phase, corrupt)


def fault_point_of_step(step: int) -> None:
    """Let all processes of the run know that a step begins, and pass the driver's fault point "step"."""
    if _armed is not None:
        _armed.write_step(step)
        _armed.fire("step", None)


def plan_faults(run_dir: str | Path, faults: Sequence[Fault], next_step: int) -> None:
    """Write the faults of a run that goes on with `next_step`, for `arm_faults`. Raises OSError."""
    directory = Path(run_dir)
    (directory / DIRECTORY / "fired").mkdir(parents=True, exist_ok=True)
    write_text_atomically(directory / PLAN, json.dumps([str(fault) for fault in faults], indent=1) + "\n")
    ArmedFaults(directory, 0.0).write_step(next_step, has_begun=False)


def arm_faults(config: Config) -> None:
    """Let the fault points of this process inject the faults of its run, those of an empty configuration: none."""
    global _armed
    _armed = None if config.faults.is_empty else ArmedFaults(Path(config.trainer.run_dir), config.faults.delay_s)


def unfired_faults() -> list[str]:
    """Return the armed faults that have not fired."""
    return _armed.unfired() if _armed is not None else []


class ArmedFaults:
    """The planned faults of a run directory."""

    def __init__(self, run_dir: Path, delay_s: float) -> None:
        self._directory, self._delay_s = run_dir.absolute() / DIRECTORY, delay_s
        self._lock = threading.Lock()
        texts: list[str] = json.loads((run_dir / PLAN).read_text(encoding="utf-8"))
        self._waiting = [  # with the name of the file of each fault; equal faults are numbered
            (Fault.of_text(text), _file_name(text, texts[:place].count(text))) for place, text in enumerate(texts)
        ]

    def write_step(self, step: int, *, has_begun: bool = True) -> None:
        """Write the step that the run is in, or that it starts with: then only faults in phase "start" fire."""
        text = json.dumps({"step": step, "has_begun": has_begun})
        write_text_atomically(self._directory / "step", text)

    def unfired(self) -> list[str]:
        """Return the faults that have not fired."""
        return [str(fault) for fault, name in self._waiting if not (self._directory / "fired" / name).exists()]

    def fire(self, phase: str, corrupt: Callable[[], None] | None) -> None:
        """Inject the first fault that waits for the current worker in this phase and whose step has come."""
        worker = current_worker.get()
        if all((fault.worker, fault.phase) != (worker, phase) for fault, _ in self._waiting):
            return
        state = json.loads((self._directory / "step").read_text(encoding="utf-8"))
        if phase != "start" and not state["has_begun"]:
            return
        with self._lock:  # a checkpoint may be written beside
            fault = self._claim(worker, phase, state["step"], can_corrupt=corrupt is not None)
        if fault is not None:
            logger.warning("fault injected: %s", fault)
            _inject(fault, self._delay_s, corrupt)

    def _claim(self, worker: str, phase: str, step: int, *, can_corrupt: bool) -> Fault | None:
        """Record that a fault fires, before it does, and return it; None if no fault is due."""
        for entry in list(self._waiting):
            fault, name = entry
            is_here = (fault.worker, fault.phase) == (worker, phase) and fault.step <= step
            if not is_here or (fault.kind == "corrupt" and not can_corrupt):
                continue
            self._waiting.remove(entry)
            if self._create(name):
                row = {"fault": str(fault), "step": step, "worker": worker, "phase": phase, "kind": fault.kind}
                row["time"] = time.time()
                _append(self._directory / "fired.jsonl", json.dumps(row) + "\n")
                return fault
        return None

    def _create(self, name: str) -> bool:
        """Create the file of a fault; return False if it exists, because the fault fired before."""
        file = self._directory / "fired" / name
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        fsync_path(file.parent)
        return True


_armed: ArmedFaults | None = None


def _file_name(text: str, number: int) -> str:
    name = text.replace(": ", " ").replace("/", "_").replace(" ", "-")
    return f"{name}-{number}" if number else name


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, 0o644)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _inject(fault: Fault, delay_s: float, corrupt: Callable[[], None] | None) -> None:
    """Do what the kind of a fault says."""
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "delay":
            time.sleep(delay_s)
        case "memory":
            import torch

            raise torch.OutOfMemoryError(f"out of memory (injected by the fault '{fault}')")
        case "disk":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected by the fault '{fault}')")
        case "corrupt" if corrupt is not None:
            corrupt()
        case _:
            raise RuntimeError(f"injected by the fault '{fault}'")


def flip_bit_of_file(path: Path) -> None:
    """Flip one bit of the last byte of a file, which is not empty."""
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


def with_flipped_bit(tensor: Any) -> Any:
    """Return a copy of a tensor, which is not empty, with one bit of its first element flipped."""
    import torch

    copy = tensor.detach().contiguous().clone()
    copy.view(-1).view(torch.uint8)[0] ^= 1
    return copy
