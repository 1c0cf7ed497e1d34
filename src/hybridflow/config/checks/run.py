"""Checks of the run: processes, pools and the roles on them, and what is profiled."""

from collections.abc import Iterator

from hybridflow.config.checks.refusal import Refusal
from hybridflow.config.environment import wrong_variable
from hybridflow.config.roles import ROLES, pools_of, ranks_of
from hybridflow.config.sections.base import RoleName
from hybridflow.config.sections.config import Config


def _placement(config: Config) -> Iterator[str]:
    pools, num_workers = config.placement.pools, config.controller.num_workers
    if pools and num_workers != 1:
        yield (
            f"controller.num_workers={num_workers} and placement.pools={pools} both set the number of ranks; "
            "use only the pools and leave num_workers at 1"
        )
    for name, processes in pools.items():
        if not processes:
            yield f"placement.pools.{name}=[] has no processes; list the processes on each node, as in [4] or [4, 4]"
    for role, pool in config.placement.roles.items():
        if pool not in pools:
            known = ", ".join(pools) or "none, placement.pools is empty"
            yield f"placement.roles.{role}={pool!r} is not a defined pool; defined pools: {known}"
    rollout_pool = config.placement.roles.get("rollout")
    if rollout_pool in pools and not config.has_rollout_pool:
        yield (
            f"placement.roles.rollout={rollout_pool!r} is the actor's pool, where the actor generates; remove it, or "
            "use another pool"
        )
    used: list[RoleName] = [role for role, traits in ROLES.items() if traits.runs(config)]
    for name in list(pools)[1:]:
        if name not in [config.placement.roles.get(role) for role in used]:
            yield (
                f"placement.pools.{name} has no role of this run; place one of {', '.join(used)} on it in "
                f"placement.roles, or remove it"
            )


def _min_processes(config: Config) -> Iterator[str]:
    pools = pools_of(config)
    for name, fewest in config.placement.min_processes.items():
        key = f"placement.min_processes.{name}={fewest}"
        if name not in pools:
            yield f"{key} is of no defined pool; defined pools: {', '.join(pools)}"
        elif fewest > sum(pools[name]):
            yield f"{key} is more than the {sum(pools[name])} processes of the pool; use at most {sum(pools[name])}"
        if config.controller.backend == "local":
            yield f"{key} needs controller.backend = 'ray', which can lose processes; remove it, or use 'ray'"
        elif not config.recovery.max_restarts:
            yield f"{key} needs recovery.max_restarts of 1 or more: a run changes its processes as it recovers"


def _backend(config: Config) -> Iterator[str]:
    controller = config.controller
    has_pools = config.placement.pools and not config.rollout.replay  # a replay runs them one after another
    if controller.backend == "local" and (controller.address or has_pools):
        key = "controller.address" if controller.address else "placement.pools"
        yield f"{key} is set, but controller.backend='local' has one process; use backend = 'ray'"


def _environment(config: Config) -> Iterator[str]:
    if problem := wrong_variable(config.controller.environment):
        yield f"controller.environment: {problem}"


def _shared_devices(config: Config) -> Iterator[str]:
    pools, controller = config.placement.pools, config.controller
    ranks = {f"placement.pools.{name}": list(processes) for name, processes in pools.items()}
    for key, processes in (ranks or {"controller.num_workers": [controller.num_workers]}).items():
        if controller.gpus_per_worker < 1 and max(processes, default=1) > 1:
            yield (
                f"controller.gpus_per_worker={controller.gpus_per_worker} would place several ranks of one pool on a "
                f"GPU, but {key}={processes}; use one process on each node, or gpus_per_worker = 1"
            )


def _profile(config: Config) -> Iterator[str]:
    how = config.trainer
    if how.total_steps and how.profile_steps and max(how.profile_steps) > how.total_steps:
        yield (
            f"trainer.profile_steps has step {max(how.profile_steps)}, but trainer.total_steps={how.total_steps} ends "
            "the run before; name earlier steps, or raise total_steps"
        )
    if how.profile_steps and not how.profile_ranks:
        yield "trainer.profile_ranks=[] profiles no rank of the steps in trainer.profile_steps; name ranks, such as [0]"
    roles: list[RoleName] = [
        role for role, traits in ROLES.items() if traits.has_group(config) or role in ("actor", "reference")
    ]
    largest = max(ranks_of(config, role) for role in roles) - 1
    if how.profile_ranks and max(how.profile_ranks) > largest:
        yield (
            f"trainer.profile_ranks has rank {max(how.profile_ranks)}, but the ranks of this run are 0 to {largest} "
            "(controller.num_workers, placement.pools); name some of these"
        )


def _num_rollout_nodes(config: Config) -> int:
    return len(config.placement.pools.get(config.placement.roles.get("rollout", ""), ()))


CHECKS = (_placement, _min_processes, _backend, _environment, _shared_devices, _profile)
REFUSALS = (
    Refusal(
        "placement.min_processes",
        "trainer.deterministic",
        "the number of ranks may change, and sums over other ranks round differently",
        "use deterministic = false, or remove min_processes",
        lambda c: bool(c.placement.min_processes) and c.trainer.deterministic,
    ),
    Refusal(
        "controller.parts = 'measured'",
        "trainer.deterministic",
        "it assigns rows to ranks by timings",
        "use parts = 'equal', or deterministic = false",
        lambda c: c.controller.parts == "measured" and c.trainer.deterministic,
    ),
    Refusal(
        "rollout.weight_sync = 'ipc'",
        "placement.pools with rollout engines on several nodes",
        "it shares memory of one node",
        "use weight_sync = 'broadcast'",
        lambda c: c.rollout.weight_sync == "ipc" and c.has_rollout_pool and _num_rollout_nodes(c) > 1,
    ),
)
