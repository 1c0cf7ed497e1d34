"""Token budgets of micro-batches that the configuration does not give: found by a trial, or after too little memory.

A trial at the first start finds those of `memory.max_tokens_per_micro_batch = "auto"`. Any budget is halved when
training runs out of memory (`recovery`), and tried doubled again later unless the run is deterministic, since another
program may have needed the memory for a while. All are kept by the run.
"""

import json
from collections.abc import Mapping
from typing import Any

from hybridflow.config import Config
from hybridflow.config.roles import pools_of
from hybridflow.controller import Role, WorkerGroup
from hybridflow.errors import CheckpointError
from hybridflow.runtime.files import write_text_atomically
from hybridflow.runtime.observe import get_logger
from hybridflow.trainers.build.groups import traits_of
from hybridflow.trainers.run.run_directory import TOKEN_BUDGETS, RunDirectory

logger = get_logger(__name__)

FIRST_PAUSE = 50
"""Number of steps with enough memory until a halved budget is tried doubled."""


class TokenBudgets:
    """The token budgets of the roles with a model, kept in the run directory, since rounding depends on them."""

    def __init__(self, config: Config, groups: Mapping[Role, WorkerGroup], run: RunDirectory) -> None:
        self._config, self._run, self._layout = config, run, _layout_of(config)
        self._groups = {
            role.value: group for role, group in groups.items() if traits_of(role).has_sharded_model(config)
        }
        kept = _read(run)
        is_same = kept.get("layout") == self._layout
        self._budgets: dict[str, int] = kept["budgets"] if is_same else {}
        self._largest: dict[str, int] = kept.get("largest", {}) if is_same else {}
        self._steps, self._pause, self._was_doubled = 0, FIRST_PAUSE, False

    def settle(self) -> None:
        """Set the recorded budgets of the same layout; with "auto", find those that are missing by a trial."""
        if self._config.memory.max_tokens_per_micro_batch == "auto":
            lengths = (self._config.data.max_prompt_length, self._config.data.max_response_length)
            for role, group in self._groups.items():
                if role not in self._budgets:
                    self._budgets[role] = min(group.find_token_budget(*lengths))
                    logger.info("%s: %d tokens per micro-batch fit in memory", role, self._budgets[role])
        self.apply()
        if self._budgets:
            self._run.documents[TOKEN_BUDGETS] = self._document()

    def apply(self) -> None:
        """Set the budgets, also those of new processes."""
        for role, budget in self._budgets.items():
            self._groups[role].set_token_budget(budget)

    def halve(self) -> bool:
        """Halve the budgets, down to the longest sequence, and record them; return whether one became smaller."""
        before, halved = self._now(), self._halved()
        if before == halved:
            return False
        if not self._largest:
            self._largest = before
        if self._was_doubled:
            self._pause *= 2
        self._was_doubled = False
        self._change(halved)
        return True

    def can_halve(self) -> bool:
        """Return whether `halve` would make a budget smaller."""
        return self._now() != self._halved()

    def _now(self) -> dict[str, int]:
        """Return the budget of each role that has one."""
        configured = self._config.memory.max_tokens_per_micro_batch
        budgets = {role: self._budgets.get(role, configured) for role in self._groups}
        return {role: budget for role, budget in budgets.items() if isinstance(budget, int)}

    def _halved(self) -> dict[str, int]:
        least = self._config.data.max_prompt_length + self._config.data.max_response_length
        return {role: max(least, budget // 2) for role, budget in self._now().items()}

    def note_step(self) -> None:
        """Count a step that had enough memory; after many, double halved budgets unless the run is deterministic.

        The pause until the next time doubles if memory runs out then.
        """
        self._steps += 1
        was_halved = bool(self._largest) and self._budgets != self._largest
        if self._config.trainer.deterministic or not was_halved or self._steps < self._pause:
            return
        self._was_doubled = True
        self._change({role: min(2 * budget, self._largest[role]) for role, budget in self._budgets.items()})
        self.apply()

    def _change(self, budgets: dict[str, int]) -> None:
        """Record new budgets, before they are used."""
        self._budgets, self._steps = budgets, 0
        write_text_atomically(self._run.path / TOKEN_BUDGETS, self._document())
        logger.warning("tokens per micro-batch from now on: %s", ", ".join(f"{r} {n}" for r, n in budgets.items()))

    def _document(self) -> str:
        largest = {"largest": self._largest} if self._largest else {}
        return json.dumps({"layout": self._layout, "budgets": self._budgets, **largest}, indent=1) + "\n"


def _layout_of(config: Config) -> dict[str, Any]:
    """Return the settings that memory use depends on; if they change, budgets are measured again."""
    sections = ("model", "parallel", "lora", "placement")
    layout: dict[str, Any] = {name: getattr(config, name).model_dump() for name in sections}
    layout["models"] = [config.critic.model_path, config.reference.model_path, config.reward.model_path]
    if config.uses_teacher:
        layout["models"].append(config.teacher.model_path)
    is_auto = config.memory.max_tokens_per_micro_batch == "auto"
    layout["memory"] = config.memory.model_dump(exclude={"max_tokens_per_micro_batch"} if is_auto else set())
    layout["pools"] = pools_of(config)
    layout["lengths"] = [config.data.max_prompt_length, config.data.max_response_length]
    return json.loads(json.dumps(layout))


def _read(run: RunDirectory) -> dict[str, Any]:
    file = run.path / TOKEN_BUDGETS
    if not file.exists():
        return {}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        largest = kept.get("largest", {})
        for role, budget in (*kept["budgets"].items(), *largest.items()):
            if type(budget) is not int or budget < sum(kept["layout"]["lengths"]):
                raise ValueError(f"{budget!r} tokens for {role}")
        return {"layout": kept["layout"], "budgets": kept["budgets"], "largest": largest}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{file}' is damaged ({error}); remove it to measure the budgets again.") from error
