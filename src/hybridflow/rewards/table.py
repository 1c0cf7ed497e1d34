"""Which reward function scores the rows of which data source."""

from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.rewards.answer_tag import last_answer
from hybridflow.rewards.countdown import countdown_reward
from hybridflow.rewards.gsm8k import gsm8k_reward
from hybridflow.rewards.multiplication import multiplication_reward
from hybridflow.rewards.number_text import last_number, parse_number

# Called with the keyword arguments data_source, solution_str, ground_truth, extra_info.
RewardFunction = Callable[..., float | Mapping[str, Any]]

REWARDS: dict[str, RewardFunction] = {
    "openai/gsm8k": gsm8k_reward,
    "countdown": countdown_reward,
    "multiplication": multiplication_reward,
}


def _number_in_tag(text: str) -> str | None:
    answer = last_answer(text)
    number = None if answer is None else parse_number(answer)
    return None if number is None else str(number)


def _final_number(text: str) -> str | None:
    number = last_number(text, after="####")
    return None if number is None else str(number)


ANSWERS: dict[str, Callable[[str], str | None]] = {
    "openai/gsm8k": _final_number,
    "countdown": last_answer,
    "multiplication": _number_in_tag,
}
"""What a response answers, by data source: equal texts are votes for the same answer. None is no answer."""
