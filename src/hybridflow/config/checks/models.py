"""Checks of the models: how they are split over ranks, their memory, and adapters."""

from collections.abc import Iterator

from hybridflow.config.checks.refusal import Refusal
from hybridflow.config.roles import ROLES, pool_of
from hybridflow.config.sections.base import RoleName
from hybridflow.config.sections.config import Config


def _parallel(config: Config) -> Iterator[str]:
    (size, product), controller = config.parallel.divisor, config.controller
    if size == 1:
        return
    if contradiction := config.parallel.contradiction:
        yield contradiction
    if controller.backend == "local":
        yield f"{product} needs {size} processes, but controller.backend='local' has one; use backend = 'ray'"
        return
    sharded: list[RoleName] = [role for role, traits in ROLES.items() if traits.has_sharded_model(config)]
    elsewhere = {pool for role, pool in config.placement.roles.items() if role not in sharded} - {
        pool_of(config, role) for role in sharded if not ROLES[role].offline
    }
    pools = {f"placement.pools.{n}": sum(ranks) for n, ranks in config.placement.pools.items() if n not in elsewhere}
    for key, ranks in (pools or {"controller.num_workers": controller.num_workers}).items():
        if ranks % size:
            yield f"{product} does not divide {key}={ranks}; change one of them"


def _tokens(config: Config) -> Iterator[str]:
    budget, data = config.memory.max_tokens_per_micro_batch, config.data
    longest = data.max_prompt_length + data.max_response_length
    if budget != "auto" and budget < longest:
        yield (
            f"memory.max_tokens_per_micro_batch={budget} cannot hold one sequence of data.max_prompt_length="
            f"{data.max_prompt_length} and data.max_response_length={data.max_response_length}; use at least {longest}"
        )


def _offload(config: Config) -> Iterator[str]:
    for role, how in config.memory.offload.items():
        traits = ROLES[role]
        if not traits.offline and not (traits.has_group(config) and traits.has_sharded_model(config)):
            reason = traits.reason.format(config=config)
            yield f"memory.offload.{role}={how!r}, but {reason}; remove the role"


def _lora(config: Config) -> Iterator[str]:
    if config.lora.rank and not config.lora.targets:
        yield "lora.targets=[] leaves no trained weights; name some linear layers"


REWARD_MODEL_ADAPTERS = Refusal(
    "lora.rank above 0",
    "hybridflow reward-model",
    "it trains its new head without adapters",
    "use lora.rank = 0",
    lambda c: c.lora.rank > 0,
)
CHECKS = (_parallel, _tokens, _offload, _lora)
REFUSALS = (
    Refusal(
        "lora.rank above 0",
        "parallel.tensor above 1",
        "adapters are not split over the ranks of a layer",
        "use tensor = 1, which also shards weights over all ranks",
        lambda c: c.lora.rank > 0 and c.parallel.tensor > 1,
    ),
    REWARD_MODEL_ADAPTERS,
)
