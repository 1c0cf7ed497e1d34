"""One worker group for each pool of processes, for what concerns processes and not roles."""

from collections.abc import Mapping

from hybridflow.config import Config
from hybridflow.controller import Role, WorkerGroup


def groups_of_pools(config: Config, groups: Mapping[Role, WorkerGroup], method: str) -> list[WorkerGroup]:
    """Return a group with this method for each pool: roles of one pool share processes.

    With updates in flight the ranks that generate are left out: they would answer only after the batches that run.
    """
    of_pools: dict[int, WorkerGroup] = {}
    for role, group in groups.items():
        if method in group.methods and not (config.updates_in_flight and role is Role.Rollout):
            of_pools.setdefault(id(group.resource_pool), group)
    return list(of_pools.values())
