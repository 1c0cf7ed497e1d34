"""Reward for multiple choice: compares the letter of the final answer with the ground truth."""

import re
from collections.abc import Mapping
from operator import index
from string import ascii_uppercase
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.runtime.latex_box import last_boxed, last_boxed_span

_MAX_TAIL_CHARS = 20_000
_TAG = re.compile(r"<answer>([^<]{0,500})</answer>")
# A letter, optionally followed by the text of its choice: B, (B), \text{(B)}, **B**, "B. Paris", "(B) Paris".
_LETTER = re.compile(r"[\s*_$]*(?:\\[a-z]+\{)?\s*(?:\(([A-Za-z])\)|([A-Za-z])(?![\w'\u2019-])(?:[.):]|[\s*_$}]*\Z))")
# In prose "A" and "I" are words unless the phrase ends after them; "answer C" without a verb or colon counts only at
# the end of a line.
_STATED = re.compile(
    r"(?<!not )(?<!not the )\b(?i:answer|choice|option)\b(?i:[ \t]+to[ \t][^.\n]{0,60}?)?"
    r"(?:[ \t]*(?i:(?:is|should be|would be|must be)(?:[ \t]+(?:clearly|therefore|thus|then|definitely|probably))?)"
    r"(?![ \t]+not\b)[ \t:*_]*|[ \t*_]*[:\uff1a][\s*_]*|[ \t*_]+(?=\(?[A-Za-z]\)?[.*_ \t]*(?:\n|\Z))|[ \t]+(?=\())"
    r"(?:(?i:option|choice)[ \t]+)?[*_$]*"
    r"(?:\(([A-Za-z])\)|([B-HJ-Z])(?![\w'\u2019-])|([A-Za-z])(?=[.),:;*_]|[ \t]*(?:\n|\Z)|[ \t]+(?:because|since)\b))"
)


def multiple_choice_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    r"""Return 1.0 if the final answer of the response is the letter of the ground truth, else 0.0.

    `ground_truth` is a letter, or with `extra_info` {"choices": [...]} also an index from 0. An answer is
    `<answer>B</answer>`, `\boxed{B}`, "Answer: (B)", "the answer is B", or a response that is only the letter. The last
    one counts; a letter beyond the choices does not count.
    """
    choices = extra_info.get("choices") if isinstance(extra_info, Mapping) else None
    num_choices = len(ascii_uppercase) if choices is None else _count(choices)
    truth = _letter_of(ground_truth, num_choices, is_index_known=choices is not None)
    return float(chosen_letter(solution_str, num_choices) == truth)


def chosen_letter(text: str, num_choices: int = len(ascii_uppercase)) -> str | None:
    """Return the capital letter of the final answer, or None; equal letters are votes for the same answer."""
    text = text[-_MAX_TAIL_CHARS:]
    answers = [(match.start(), _letter(match[1], num_choices)) for match in _TAG.finditer(text)]
    box = last_boxed_span(text)
    if box is not None:
        answers.append((box[0], _letter(text[slice(*box)], num_choices)))
    for match in _STATED.finditer(text):
        letter = next(group for group in match.groups() if group).upper()
        if letter in ascii_uppercase[:num_choices]:
            answers.append((match.start(), letter))
    if answers:
        return max(answers, key=lambda answer: answer[0])[1]
    return _letter(text, num_choices) if len(text.strip(" \t\n().:*_")) == 1 else None


def _letter(text: str, num_choices: int) -> str | None:
    match = _LETTER.match(text)
    letter = (match[1] or match[2]).upper() if match else ""
    return letter if letter and letter in ascii_uppercase[:num_choices] else None


def _count(choices: Any) -> int:
    if not isinstance(choices, str | Mapping) and hasattr(choices, "__len__") and 1 <= len(choices) <= 26:
        return len(choices)
    raise RewardError(f"extra_info['choices'] must be a list of 1 to 26 choices, got {choices!r:.300}.")


def _letter_of(ground_truth: Any, num_choices: int, *, is_index_known: bool) -> str:
    letters = ascii_uppercase[:num_choices]
    if isinstance(ground_truth, str):
        if letter := _letter(last_boxed(ground_truth) or ground_truth, num_choices):
            return letter
    elif is_index_known and not isinstance(ground_truth, bool):
        try:
            position = index(ground_truth)
        except TypeError:
            position = -1
        if 0 <= position < num_choices:
            return letters[position]
    also = f" or an index from 0 to {num_choices - 1}" if is_index_known else ""
    raise RewardError(
        f"the ground truth must be a letter from A to {letters[-1]}{also}, got {ground_truth!r}."
        + ("" if is_index_known else " An index needs extra_info={'choices': [...]}.")
    )
