"""Tasks of reasoning-gym: "reasoning-gym:TASK", or "reasoning-gym:TASK?key=value" with the task's configuration.

A row holds its whole entry, as a literal of Python: JSON has no tuples, and a task's score may need them.
"""

import asyncio
import warnings
from ast import literal_eval
from collections.abc import Iterator
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
    """Return the class of a task. Raises EnvironmentConfigError for a task that does not exist."""
    task, dataset = _dataset(rest, seed=0, size=1)
    return type(
        task, (_ReasoningGym,), {"source": f"reasoning-gym:{rest}", "score": staticmethod(dataset.score_answer)}
    )


def rows(rest: str, split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the entries of the data set of a seed; splits and seeds have different ones."""
    task, dataset = _dataset(rest, first_seed(split, seed), count)
    for entry in dataset:
        literal = repr(_plain(entry))
        if literal_eval(literal) != entry:
            raise EnvironmentConfigError(f"an entry of {task} cannot be stored: {literal:.200}.")
        messages = {"system": SYSTEM_PROMPTS["default"].strip(), "user": entry["question"]}
        yield {
            "prompt": [{"role": role, "content": content} for role, content in messages.items()],
            "data_source": task,
            "reward_model": {"style": "rule", "ground_truth": entry["answer"] or ""},
            "extra_info": {"entry": literal},
        }


class _ReasoningGym(Environment):
    """An episode of one turn: the answer to the question of an entry."""

    source: str
    score: Any

    async def reward(self, episode: Episode) -> dict[str, float]:
        """Return the task's own score of the last `<answer>`, or of the whole text if it has none.

        `unreadable`: 1 if the task's score raised an error for this answer, which is then worth 0.
        """
        text, literal = episode.turns[-1].content, (episode.row["extra_info"] or {}).get("entry")
        if literal is None:
            raise EnvironmentConfigError(
                f"a row of {self.source} has no extra_info.entry; write rows: hybridflow prepare environment "
                f"'{self.source}'"
            )
        answer, entry = extract_answer(text), literal_eval(literal)
        try:
            score = await asyncio.to_thread(self.score, text if answer is None else answer, entry)
        except Exception:  # prime_factorization, among others, takes `int` of an answer
            return {"score": 0.0, "unreadable": 1.0}
        return {"score": float(score), "unreadable": 0.0}


def _dataset(rest: str, seed: int, size: int) -> tuple[str, Any]:
    task, arguments = arguments_of(rest)
    if task not in DATASETS:
        raise EnvironmentConfigError(
            f"{task!r} is not a task of reasoning-gym; the tasks are {', '.join(sorted(DATASETS))}."
        )
    return task, reasoning_gym.create_dataset(task, seed=seed, size=size, **arguments)


def _plain(value: Any) -> Any:
    """Return a value without subclasses of texts and numbers, such as those of numpy."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value))
    return next((kind(value) for kind in (str, bool, int, float) if isinstance(value, kind)), value)
