"""Faults to inject: how one is written, and which kinds, phases and workers a configuration has.

A fault is written as "3: kill actor_rollout/1 in backward". It fires when its worker first passes its phase in its step
or later. `PHASES` is the table of phases and of the kinds that apply there.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hybridflow.algorithms.declarations import ESTIMATORS
from hybridflow.config.roles import ROLES, ranks_of
from hybridflow.config.sections.base import RoleName
from hybridflow.config.sections.config import Config
from hybridflow.errors import ConfigError

DRIVER = "driver"
"""Name of the driver in a plan; a worker is named by its role and rank, as in `critic/0`."""

KINDS = {
    "kill": "the process sends itself SIGKILL",
    "stop": "the process sends itself SIGSTOP; it continues after SIGCONT",
    "delay": "the process sleeps for `faults.delay_s` seconds",
    "memory": "`torch.OutOfMemoryError`, as if memory ran out",
    "disk": "`OSError` with `ENOSPC`, as if the disk were full",
    "corrupt": "one bit of a weight in transit, or of a written file, is flipped after its checksum was computed",
    "error": "`RuntimeError`, as a bug would raise it",
}


@dataclass(frozen=True)
class Phase:
    """A place in the code, and the kinds of faults that apply there."""

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

GRAMMAR = "'STEP: KIND WORKER in PHASE', as in '3: kill actor_rollout/0 in backward'"
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
        """Parse an entry of a plan. Raises ConfigError if it does not follow the grammar."""
        match = _ENTRY.fullmatch(text)
        if not match:
            raise ConfigError(f"expected {GRAMMAR}")
        return Fault(int(match[1]), *match.groups()[1:])


def training_roles(config: Config) -> list[RoleName]:
    """Return the roles that any training command may have with this configuration."""
    return [role for role, traits in ROLES.items() if traits.has_group(config) or role in ("actor", "reference")]


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


def planned_faults(config: Config, roles: Collection[RoleName], last_step: int | None = None) -> list[Fault]:
    """Return the faults of faults.plan. Raises ConfigError with all wrong entries."""
    if problems := fault_problems(config, roles, last_step):
        raise ConfigError("\n  ".join([f"{len(problems)} problem(s) in faults.plan:", *problems]))
    return [Fault.of_text(text) for text in config.faults.plan]


def fault_problems(config: Config, roles: Collection[RoleName], last_step: int | None = None) -> list[str]:
    """Return one line for each entry of faults.plan that cannot fire in a run with these roles and steps."""
    return [
        f"faults.plan: {text[:200]!r} is invalid: {problem}; {_valid(config, roles)}"
        for text in config.faults.plan
        for problem in _problem(text, config, roles, last_step)
    ]


def _problem(text: str, config: Config, roles: Collection[RoleName], last_step: int | None) -> Iterator[str]:
    """Yield the first problem of an entry, if it has one."""
    try:
        fault = Fault.of_text(text)
    except ConfigError as error:
        yield str(error)
        return
    role, slash, rank = fault.worker.partition("/")
    workers = workers_of(config, roles)
    if fault.step < 1 or (last_step and fault.step > last_step):
        yield f"expected a step from 1{f' to {last_step}' if last_step else ''}, got {fault.step}"
    elif fault.kind not in KINDS:
        yield f"{fault.kind!r} is not a kind"
    elif fault.phase not in PHASES:
        yield f"{fault.phase!r} is not a phase"
    elif role in ROLES and config.controller.backend == "local":
        yield f"controller.backend='local' runs {role} in the driver's process; use backend = 'ray'"
    elif role not in workers or bool(slash) != (role != DRIVER):
        yield f"{fault.worker!r} is not a worker of this run"
    elif slash and not (rank.isdecimal() and int(rank) < workers[role]):
        yield f"{role} has no rank {rank!r}"
    elif fault.phase not in phases_of(config, role):
        yield f"{fault.worker} does not pass phase {fault.phase!r}, only {', '.join(phases_of(config, role))}"
    elif fault.kind not in kinds_at(config, fault.worker, fault.phase):
        kinds = ", ".join(kinds_at(config, fault.worker, fault.phase))
        yield f"kind {fault.kind!r} does not apply to {fault.worker} in phase {fault.phase!r}, only {kinds}"


def _valid(config: Config, roles: Collection[RoleName]) -> str:
    """Return the valid kinds, phases, roles and ranks, for an error."""
    names = [
        role if role == DRIVER else f"{role}/0" + (f" to {role}/{ranks - 1}" if ranks > 1 else "")
        for role, ranks in workers_of(config, roles).items()
    ]
    return f"kinds: {', '.join(KINDS)}; phases: {', '.join(PHASES)}; workers: {', '.join(names)}"


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


def phases_markdown() -> str:
    """Return the phases and the kinds that apply there as a Markdown table."""
    rows = [
        f"| `{name}` | {'driver' if name in OF_DRIVER else 'worker'} | {phase.place} | "
        + " | ".join("x" if kind in phase.kinds else "" for kind in KINDS)
        + " |"
        for name, phase in PHASES.items()
    ]
    head = f"| phase | of a | place | {' | '.join(f'`{kind}`' for kind in KINDS)} |"
    return "\n".join([head, "|---" * (3 + len(KINDS)) + "|", *rows]) + "\n"


def kinds_markdown() -> str:
    """Return the kinds of faults as a Markdown table."""
    rows = [f"| `{kind}` | {what} |" for kind, what in KINDS.items()]
    return "\n".join(["| kind | what happens |", "|---|---|", *rows]) + "\n"
