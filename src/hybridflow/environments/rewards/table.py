"""Tables of the built-in reward functions and answer extractors by data source."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hybridflow.environments.code.code_tests import code_reward
from hybridflow.environments.rewards.answer_text import (
    gsm8k_flexible_reward,
    gsm8k_reward,
    last_answer,
    last_number,
    multiplication_reward,
    parse_number,
)
from hybridflow.environments.rewards.arithmetic import countdown_reward
from hybridflow.environments.rewards.math_answer import MAX_CHARS, boxed_answer, math_reward
from hybridflow.environments.rewards.multiple_choice import chosen_letter, multiple_choice_reward
from hybridflow.errors import RewardConfigError

RewardFunction = Callable[..., float | Mapping[str, Any]]
"""A function that is called with the keyword arguments `data_source, solution_str, ground_truth, extra_info`."""


def no_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 0.0 for every response: for data without a ground truth, such as the prompts of a distillation."""
    return 0.0


REWARDS: dict[str, RewardFunction] = {
    "openai/gsm8k": gsm8k_reward,
    "countdown": countdown_reward,
    "multiplication": multiplication_reward,
    "math": math_reward,
    "HuggingFaceH4/MATH-500": math_reward,
    "DigitalLearningGmbH/MATH-lighteval": math_reward,
    "math_dapo": math_reward,
    "multiple_choice": multiple_choice_reward,
    "code": code_reward,
}
"""The included reward functions, by the `data_source` of a row."""

IN_PROCESSES = frozenset({math_reward, code_reward})
"""Functions that may take long, or forever, on a response: a run calls them in processes, like a user's function."""

_ANSWER_LINE = re.compile(r"\bAnswer:(.*)", re.IGNORECASE)

QUICK = frozenset(REWARDS.values()) - IN_PROCESSES | {gsm8k_flexible_reward, no_reward}
"""Built-in functions that a run calls in the rank itself, also if reward.function names them."""


def reward_of(data_source: str) -> RewardFunction:
    """Return the function of the data source. Raises RewardConfigError if the table has none."""
    require_known([data_source])
    return REWARDS[data_source]


def require_known(data_sources: Iterable[str], files: Iterable[str] = ()) -> None:
    """Raise RewardConfigError if the table has no function for one of the data sources, read from `files`."""
    if unknown := sorted(set(data_sources) - REWARDS.keys()):
        read_from = f" in {', '.join(files)}" if files else ""
        raise RewardConfigError(
            f"no built-in reward function serves data_source {', '.join(map(repr, unknown))}{read_from}; known are "
            f'{", ".join(sorted(REWARDS))}. Set reward.function="path.py:function" to score with your own.'
        )


def table_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """Score the response by the function of its data source."""
    return reward_of(data_source)(data_source, solution_str, ground_truth, extra_info)


TABLE = f"{__name__}:table_reward"
"""The name of `table_reward`."""


def _number_in_tag(text: str) -> str | None:
    number = parse_number(last_answer(text) or "")
    return None if number is None else str(number)


def _final_number(text: str) -> str | None:
    number = last_number(text, after="####")
    return None if number is None else str(number)


def _boxed_or_last_line(text: str) -> str | None:
    lines = _ANSWER_LINE.findall(text)
    last = lines[-1].strip(" \t$*.")[:MAX_CHARS] if lines else ""
    return boxed_answer(text) or boxed_answer(rf"\boxed{{{last}}}")


ANSWERS: dict[str, Callable[[str], str | None]] = {
    "openai/gsm8k": _final_number,
    "countdown": last_answer,
    "multiplication": _number_in_tag,
    "math": boxed_answer,
    "HuggingFaceH4/MATH-500": boxed_answer,
    "DigitalLearningGmbH/MATH-lighteval": boxed_answer,
    "math_dapo": _boxed_or_last_line,
    "multiple_choice": chosen_letter,
}
"""Extractors of the answer of a response by data source: equal texts are votes for the same answer; None: no answer."""
