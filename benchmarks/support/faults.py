"""Faults for tests of recovery: how one is written, where it applies, and the plan of the faults of a run.

A fault is written as "3: kill actor_rollout/1 in backward": step, kind, worker, phase. It fires when its worker first
passes its phase in its step or later. `plan_faults` writes a plan; the environment variable HYBRIDFLOW_FAULTS with the
value that it returns makes a run follow it.

RUN_DIR/faults/plan.json     the faults
RUN_DIR/faults/hook.py       what HYBRIDFLOW_FAULTS names
RUN_DIR/faults/step          the step of the run, which the driver writes and the other processes read
RUN_DIR/faults/fired/        a file for each fault that fired, created before: each fires once, also after a restart
RUN_DIR/faults/fired.jsonl   a row for each: fault, step, worker, phase, kind, time
"""

import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridflow.algorithms.declarations import ESTIMATORS
from hybridflow.config import Config, RoleName
from hybridflow.config.roles import ranks_of
from hybridflow.rollout.weight_sync.buckets import Bucket
from hybridflow.runtime.files import write_text_atomically
from hybridflow.runtime.observe import get_logger, read_jsonl
from hybridflow.runtime.partial_tensor import PartialTensor, contents_of

logger = get_logger(__name__)

DRIVER = "driver"


@dataclass(frozen=True)
class Phase:
    """A fault point in the code, and the kinds of faults that apply there."""

    place: str
    kinds: tuple[str, ...]


_ALWAYS = ("kill", "stop", "delay", "error")
_COMPUTING = ("kill", "stop", "delay", "memory", "error")

PHASES: Mapping[str, Phase] = {
    "start": Phase("a worker is constructed, before it joins its process group", _ALWAYS),
    "generate": Phase("between two decoding steps", _COMPUTING),
    "score": Phase("before a reward function or reward model scores", _ALWAYS),
    "forward": Phase("before the forward pass of a micro-batch", _COMPUTING),
    "backward": Phase("after the backward pass of a micro-batch, while other ranks go on", _COMPUTING),
    "optimizer": Phase("before an optimizer step", _COMPUTING),
    "sync_send": Phase("a bucket of weights is gathered and not yet sent", (*_COMPUTING, "corrupt")),
    "sync_receive": Phase("before a bucket of weights is received", _COMPUTING),
    "save": Phase("a rank has written its files of a checkpoint, and not reported them", (*_ALWAYS, "disk", "corrupt")),
    "step": Phase("a step begins", _ALWAYS),
    "publish": Phase("all files of a checkpoint are written, and it is not yet renamed", (*_ALWAYS, "disk")),
    "log": Phase("the row of a step is written, and its checkpoint is not yet begun", _ALWAYS),
}
OF_DRIVER = ("step", "publish", "log")

_ENTRY = re.compile(r"\s*(\d{1,9})\s*:\s*(\S+)\s+(\S+)\s+in\s+(\S+)\s*")


@dataclass(frozen=True)
class Fault:
    """A fault of a plan; as text, the entry of the plan."""

    step: int
    kind: str
    worker: str
    phase: str

    def __str__(self) -> str:
        return f"{self.step}: {self.kind} {self.worker} in {self.phase}"

    @staticmethod
    def of_text(text: str) -> "Fault":
        """Parse an entry of a plan. Raises ValueError if it is not one, or its kind does not apply in its phase."""
        match = _ENTRY.fullmatch(text)
        if not match:
            raise ValueError(f"{text!r} is not 'STEP: KIND WORKER in PHASE', as in '3: kill critic/0 in backward'")
        fault = Fault(int(match[1]), *match.groups()[1:])
        if fault.phase not in PHASES:
            raise ValueError(f"{text!r}: {fault.phase!r} is not a phase; phases: {', '.join(PHASES)}")
        if fault.kind not in PHASES[fault.phase].kinds:
            raise ValueError(f"{text!r}: kinds in this phase: {', '.join(PHASES[fault.phase].kinds)}")
        return fault


def phases_of(config: Config, role: str) -> tuple[str, ...]:
    """Return the phases that a worker of a role, or the driver, passes in a run, as far as the configuration says."""
    if role == DRIVER:
        return OF_DRIVER
    syncs_inside = not config.has_rollout_pool and _has_own_weights(config)
    passed = {
        "start": True,
        "generate": role == "rollout" or (role == "actor_rollout" and not config.has_rollout_pool),
        "score": role == "reward",
        "forward": _computes_outputs(config, role),
        "backward": role in ("actor_rollout", "critic", "actor"),
        "optimizer": role in ("actor_rollout", "critic", "actor"),
        "sync_send": role == "actor_rollout" and (config.has_rollout_pool or syncs_inside),
        "sync_receive": role == "rollout" or (role == "actor_rollout" and syncs_inside),
        "save": role in ("actor_rollout", "critic", "actor") or (role == "reward" and not config.reward.model_path),
    }
    return tuple(phase for phase, passes in passed.items() if passes)


def kinds_at(config: Config, worker: str, phase: str) -> tuple[str, ...]:
    """Return the kinds of faults that apply when a worker passes a phase."""
    sends = not config.has_rollout_pool or worker.endswith("/0")  # other ranks only gather weights for another pool
    return tuple(kind for kind in PHASES[phase].kinds if sends or (phase, kind) != ("sync_send", "corrupt"))


def workers_of(config: Config, roles: Collection[RoleName]) -> dict[str, int]:
    """Return the driver and the roles whose faults can be injected, each with its number of ranks."""
    on_ray = config.controller.backend == "ray"
    return {DRIVER: 1, **{role: ranks_of(config, role) for role in roles if on_ray}}


def _has_own_weights(config: Config) -> bool:
    """Whether the rollout engine of a training rank has weights of its own, which are synced inside its process."""
    return config.rollout.backend == "vllm" or ranks_of(config, "actor_rollout") > 1 or config.lora.rank > 0


def _computes_outputs(config: Config, role: str) -> bool:
    """Whether a role computes log-probs or values besides its updates."""
    if role != "actor_rollout":
        return role != "rollout" and (role != "reward" or bool(config.reward.model_path))
    algorithm, columns = config.algorithm, config.extra_columns
    reads = algorithm.advantage not in ESTIMATORS or "sum_squared_probs" in columns
    needed = reads or algorithm.kl_in_reward or config.corrects_rollouts or not config.is_on_policy
    as_reference = config.uses_reference and config.actor_is_reference
    probes = config.has_rollout_pool or _has_own_weights(config)  # after each weight sync
    return probes or as_reference or (needed and config.actor.old_log_probs_from == "trainer")


def plan_faults(run_dir: str | Path, faults: Sequence[str], next_step: int = 1, delay_s: float = 0.0) -> str:
    """Write the plan of a run that goes on with `next_step`; return the value of HYBRIDFLOW_FAULTS.

    `delay_s`: seconds that a fault of kind "delay" takes. Raises ValueError for an entry that is not a fault.
    """
    directory = Path(run_dir).absolute() / "faults"
    (directory / "fired").mkdir(parents=True, exist_ok=True)
    plan = {"faults": [str(Fault.of_text(text)) for text in faults], "delay_s": delay_s}
    write_text_atomically(directory / "plan.json", json.dumps(plan, indent=1))
    hook = [
        "import sys",
        f"sys.path.append({str(Path(__file__).parents[1])!r})",
        "from support.faults import Plan",
        f"inject = Plan({str(directory)!r}).inject",
    ]
    write_text_atomically(directory / "hook.py", "\n".join(hook))
    Plan(directory).write_step(next_step, has_begun=False)
    return f"{directory / 'hook.py'}:inject"


def fired_faults(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of the faults that fired in a run."""
    path = run_dir / "faults" / "fired.jsonl"
    return read_jsonl(path) if path.exists() else []


class Plan:
    """The planned faults in a directory, and which of them have fired."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._lock = threading.Lock()
        plan = json.loads((self._directory / "plan.json").read_text())
        texts, self._delay_s = plan["faults"], plan["delay_s"]
        self._waiting = [  # with the name of the file of each fault; equal faults are numbered
            (Fault.of_text(text), f"{re.sub('[^a-z0-9_]+', '-', text)}-{texts[:place].count(text)}")
            for place, text in enumerate(texts)
        ]

    def write_step(self, step: int, *, has_begun: bool) -> None:
        """Write the step that the run is in, or that it starts with: then only faults in phase "start" fire."""
        write_text_atomically(self._directory / "step", json.dumps({"step": step, "has_begun": has_begun}))

    def inject(self, phase: str, worker: str, target: Any) -> None:
        """Inject the first fault that waits for this worker in this phase and whose step has come."""
        if phase == "step":
            self.write_step(target, has_begun=True)
        if all((fault.worker, fault.phase) != (worker, phase) for fault, _ in self._waiting):
            return
        state = json.loads((self._directory / "step").read_text())
        if phase != "start" and not state["has_begun"]:
            return
        with self._lock:  # a checkpoint may be written beside
            fault = self._claim(worker, phase, state["step"], can_corrupt=target is not None)
        if fault is not None:
            logger.warning("fault injected: %s", fault)
            _inject(fault, self._delay_s, target)

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
                with open(self._directory / "fired.jsonl", "a") as file:  # one write
                    file.write(json.dumps({**row, "time": time.time()}) + "\n")
                return fault
        return None

    def _create(self, name: str) -> bool:
        """Create the file of a fault; return False if it exists, because the fault fired before."""
        try:
            (self._directory / "fired" / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _inject(fault: Fault, delay_s: float, target: Any) -> None:
    """Do what the kind of a fault says."""
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "delay":
            time.sleep(delay_s)
        case "memory":
            raise torch.OutOfMemoryError(f"out of memory (injected by the fault '{fault}')")
        case "disk":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected by the fault '{fault}')")
        case "corrupt":
            flip_bit(target)
        case _:
            raise RuntimeError(f"injected by the fault '{fault}'")


def flip_bit(target: Path | Bucket) -> None:
    """Flip one bit: of the last byte of a file, or of a copy of the first weight of a bucket, not its fingerprint."""
    if isinstance(target, Path):
        content = bytearray(target.read_bytes())
        content[-1] ^= 1
        target.write_bytes(content)
        return
    name, tensor = next(iter(target.weights.items()))
    copy = contents_of(tensor).detach().contiguous().clone()
    copy.view(-1).view(torch.uint8)[0] ^= 1
    if isinstance(tensor, PartialTensor):
        tensor.contents = copy
    else:
        target.weights[name] = copy
