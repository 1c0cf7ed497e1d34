"""The roles of a run: when each one runs, its kind of model, and the worker group that plays it.

`ROLES` is the table. A new role is one line here, and a name in `RoleName` and `Role`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hybridflow.config.sections.base import RoleName
from hybridflow.config.sections.config import Config

ModelKind = Literal["sharded", "engine", "none"]


def _always(config: Config) -> bool:
    return True


def _never(config: Config) -> bool:
    return False


def _sharded(config: Config) -> ModelKind:
    return "sharded"


MAIN_POOL = "main"
"""The pool of all roles if placement.pools is empty."""


@dataclass(frozen=True)
class RoleTraits:
    """Properties of a role.

    `runs`: whether a run of reinforcement learning has the role.
    `in_actor`: whether the worker group of `actor_rollout` plays it, so that it has no separate group.
    `model`: "sharded": a model sharded by `parallel`, to which memory.offload and token budgets apply; "engine": the
    model of a rollout engine, which manages its memory itself.
    `reason`: why memory.offload does not apply if the role has no group or no sharded model; a format of `config`.
    `offline`: whether only offline training has the role; `runs` does not cover it.
    """

    runs: Callable[[Config], bool] = _always
    in_actor: Callable[[Config], bool] = _never
    model: Callable[[Config], ModelKind] = _sharded
    reason: str = ""
    offline: bool = False

    def has_group(self, config: Config) -> bool:
        """Return whether a run of reinforcement learning has a worker group for this role."""
        return self.runs(config) and not self.in_actor(config)

    def has_sharded_model(self, config: Config) -> bool:
        """Return whether `parallel`, memory.offload and token budgets apply to the role's model."""
        return self.model(config) == "sharded"


ROLES: Mapping[RoleName, RoleTraits] = {
    "actor_rollout": RoleTraits(),
    "rollout": RoleTraits(
        in_actor=lambda config: not config.has_rollout_pool,
        model=lambda config: "engine",
        reason="a rollout engine frees its memory itself while the policy learns in its process",
    ),
    "reward": RoleTraits(
        model=lambda config: "sharded" if config.reward.model_path else "none",
        reason="reward.model_path is empty, so there is no reward model",
    ),
    "critic": RoleTraits(
        runs=lambda config: config.uses_critic,
        reason="algorithm.advantage={config.algorithm.advantage!r} has no critic",
    ),
    "reference": RoleTraits(
        runs=lambda config: config.uses_reference,
        in_actor=lambda config: config.actor_is_reference,
        reason="there is no separate reference model: no KL term needs one, or it is the actor with its adapters off",
    ),
    "teacher": RoleTraits(
        runs=lambda config: config.uses_teacher,
        reason="teacher.model_path is empty, so there is no teacher",
    ),
    "actor": RoleTraits(runs=_never, offline=True),
}


def pools_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the number of processes on each node, by the name of the pool: `MAIN_POOL` if no pool is configured."""
    return dict(config.placement.pools) or {MAIN_POOL: (config.controller.num_workers,)}


def pool_of(config: Config, role: str) -> str:
    """Return the name of the pool of a role: the configured one, or the first."""
    return {**config.placement.roles}.get(role, next(iter(pools_of(config))))  # pyright: ignore[reportArgumentType]


def ranks_of(config: Config, role: str) -> int:
    """Return the number of processes of a role, 0 if its pool is not defined."""
    return sum(pools_of(config).get(pool_of(config, role), ()))


def has_own_pool(config: Config, role: RoleName) -> bool:
    """Return whether no other role of a run of reinforcement learning is in the pool of this one."""
    others = (pool_of(config, name) for name, traits in ROLES.items() if name != role and traits.has_group(config))
    return pool_of(config, role) not in others
