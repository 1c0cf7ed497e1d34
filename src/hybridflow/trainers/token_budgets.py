"""Token budgets of `memory.max_tokens_per_micro_batch = "auto"`: found by a trial at the first start, then kept."""

import json
from collections.abc import Mapping
from typing import Any

from hybridflow.config import Config
from hybridflow.controller import Role, WorkerGroup
from hybridflow.errors import CheckpointError
from hybridflow.observability import get_logger
from hybridflow.trainers.groups import pools_of, traits_of
from hybridflow.trainers.run_directory import TOKEN_BUDGETS, RunDirectory

logger = get_logger(__name__)


def settle_token_budgets(config: Config, groups: Mapping[Role, WorkerGroup], run: RunDirectory) -> None:
    """Set the token budget of each role with a model: the recorded one for the same layout, otherwise a new one.

    Rounding depends on the budget, so a resumed run keeps it.
    """
    if config.memory.max_tokens_per_micro_batch != "auto":
        return
    layout = _layout_of(config)
    kept = _read(run)
    budgets: dict[str, int] = kept["budgets"] if kept.get("layout") == layout else {}
    for role, group in groups.items():
        if not traits_of(role).has_sharded_model(config):
            continue
        if role.value not in budgets:
            lengths = (config.data.max_prompt_length, config.data.max_response_length)
            budgets[role.value] = min(group.find_token_budget(*lengths))
            logger.info("%s: %d tokens per micro-batch fit in memory", role.value, budgets[role.value])
        group.set_token_budget(budgets[role.value])
    run.documents[TOKEN_BUDGETS] = json.dumps({"layout": layout, "budgets": budgets}, indent=1) + "\n"


def _layout_of(config: Config) -> dict[str, Any]:
    """Return the settings that memory use depends on; if they change, budgets are measured again."""
    sections = ("model", "parallel", "lora", "placement")
    layout: dict[str, Any] = {name: getattr(config, name).model_dump() for name in sections}
    layout["models"] = [config.critic.model_path, config.reference.model_path, config.reward.model_path]
    layout["models"] += [config.teacher.model_path] * config.uses_teacher
    layout["memory"] = config.memory.model_dump(exclude={"max_tokens_per_micro_batch"})
    layout["pools"] = pools_of(config)
    layout["lengths"] = [config.data.max_prompt_length, config.data.max_response_length]
    return json.loads(json.dumps(layout))


def _read(run: RunDirectory) -> dict[str, Any]:
    file = run.path / TOKEN_BUDGETS
    if not file.exists():
        return {}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        for role, budget in kept["budgets"].items():
            if type(budget) is not int or budget < sum(kept["layout"]["lengths"]):
                raise ValueError(f"{budget!r} tokens for {role}")
        return {"layout": kept["layout"], "budgets": kept["budgets"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{file}' is damaged ({error}); remove it to measure the budgets again.") from error
