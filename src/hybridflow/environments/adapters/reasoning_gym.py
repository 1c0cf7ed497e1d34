"""Tasks of reasoning-gym: "reasoning-gym:TASK", or "reasoning-gym:TASK?key=value" with the task's configuration.

A row has the place of its entry in a data set: the seed and size of the data set and the index. The entry is made again
from them to score an answer, since values of JSON would not hold all that entries have.
"""

import asyncio
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from hybridflow.environments.adapters import arguments_of, first_seed
from hybridflow.environments.episodes.environment import Environment, Episode
from hybridflow.errors import EnvironmentConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, which it imports
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer


def make(rest: str) -> type["_ReasoningGym"]:
    """Return the class of a task. Raises EnvironmentConfigError for a task or an argument that does not exist."""
    task, arguments = arguments_of(rest)
    if task not in DATASETS:
        raise EnvironmentConfigError(
            f"{task!r} is not a task of reasoning-gym; the tasks are {', '.join(sorted(DATASETS))}."
        )

    @lru_cache(maxsize=16)
    def dataset(seed: int, size: int) -> Any:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **arguments)

    dataset(0, 1)  # checks the arguments
    members = {"source": f"reasoning-gym:{rest}", "task": task, "dataset": staticmethod(dataset)}
    return type(task, (_ReasoningGym,), members)


def rows(rest: str, split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield entries of the data set of a seed; splits and seeds have different ones."""
    made, place = make(rest), {"seed": first_seed(split, seed), "size": count}
    for index in range(count):
        entry = made.dataset(**place)[index]
        system = {"role": "system", "content": SYSTEM_PROMPTS["default"].strip()}
        yield {
            "prompt": [system, {"role": "user", "content": entry["question"]}],
            "data_source": made.task,
            "reward_model": {"style": "rule", "ground_truth": entry["answer"] or ""},
            "extra_info": {"question": entry["question"], "index": index, **place},
        }


class _ReasoningGym(Environment):
    """An episode of one turn: the answer to the question of an entry."""

    source: str
    task: str
    dataset: Any

    async def reward(self, episode: Episode) -> dict[str, float]:
        """Return the task's own score of the last `<answer>`, or of the whole text if it has none.

        `unreadable`: 1 if the task's score raised an error for this answer, which is then worth 0.
        """
        text, entry = episode.turns[-1].content, self._entry(episode.row.get("extra_info") or {})
        answer = extract_answer(text)
        try:
            score = await asyncio.to_thread(self.dataset(0, 1).score_answer, text if answer is None else answer, entry)
        except Exception:  # prime_factorization, among others, takes `int` of an answer
            return {"score": 0.0, "unreadable": 1.0}
        return {"score": float(score), "unreadable": 0.0}

    def _entry(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        try:
            entry = self.dataset(extra["seed"], extra["size"])[extra["index"]]
        except KeyError as missing:
            entry = {"question": f"a row without extra_info.{missing.args[0]}"}
        if entry["question"] != extra.get("question"):
            raise EnvironmentConfigError(
                f"a row is not an entry of {self.source} in this version of reasoning-gym; write the rows again: "
                f"hybridflow prepare environment '{self.source}'"
            )
        return entry
