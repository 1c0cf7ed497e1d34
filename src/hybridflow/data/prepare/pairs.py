"""Answers and pairs of answers in the forms in which data sets have them: texts, messages, or whole conversations."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from hybridflow.data.parquet_rows import shorten
from hybridflow.data.prepare.prompt_file import Messages
from hybridflow.data.prepare.records import is_empty, messages_of, value_of
from hybridflow.errors import DataError

_WORD = re.compile("[0-9A-Za-z]")
"""A sign of a word; in scripts without spaces a prompt may end anywhere."""


class Sides(NamedTuple):
    """Two answers, each with the messages before it; those are empty if the row has no prompt."""

    asked: Messages
    chosen: str
    asked_too: Messages
    rejected: str


def read_sides(record: Mapping[str, Any], names: Mapping[str, str], place: str) -> Sides:
    """Return the answers of a row, whose columns have these `names`, and what they answer.

    An answer is a text, a message of the assistant, or messages that end with it. The messages before it come before
    the column of the prompt. Two texts without a prompt begin with it. Raises DataError for other values.
    """
    prompt = None
    with suppress(DataError):  # it may be missing
        prompt = value_of(record, names["prompt"], place)
    chosen, rejected = (value_of(record, names[side], place) for side in ("chosen", "rejected"))
    if is_empty(prompt) and isinstance(chosen, str) and isinstance(rejected, str):
        prompt = common_prompt(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    asked = [] if is_empty(prompt) else messages_of(prompt, names["prompt"], place)
    before, text = read_answer(chosen, names["chosen"], place)
    before_too, text_too = read_answer(rejected, names["rejected"], place)
    return Sides(before or asked, text, before_too or asked, text_too)


def common_prompt(chosen: str, rejected: str) -> str:
    """Return the text with which both begin, without a part of a word and without the space before the answers."""
    size = min(len(chosen), len(rejected))
    size = next((i for i in range(size) if chosen[i] != rejected[i]), size)
    while size and all(map(_WORD.search, (chosen[size - 1], chosen[size : size + 1] + rejected[size : size + 1]))):
        size -= 1
    return chosen[:size].rstrip(" ")


def read_answer(value: Any, column: str, place: str) -> tuple[Messages, str]:
    """Return (the messages before an answer, its text); "" for an empty value. Raises DataError for other values."""
    if is_empty(value) or isinstance(value, str):
        return [], value or ""
    *prompt, answer = messages_of([value] if isinstance(value, Mapping) else value, column, place)
    if answer["role"] != "assistant":
        raise DataError(
            f"{place}: the last message of '{column}' has the role {answer['role']!r}; expected the answer of the "
            "'assistant'."
        )
    read = {"role": answer["role"], "content": answer["content"], "name": answer.get("name"), "weight": 1}
    if lost := [key for key in answer if answer[key] not in (None, "", [], read.get(key))]:
        raise DataError(
            f"{place}: the answer in '{column}' has {lost[0]}={shorten(answer[lost[0]])}, but is used as a text; write "
            "all of it as content or remove it (data.map), or use conversations in 'messages' (hybridflow sft)."
        )
    return prompt, answer["content"]


def require_same_prompt(prompt: Any, before: Sequence[Mapping[str, Any]], column: str, place: str) -> None:
    """Raise DataError if the messages before an answer are not the prompt, nor has one of them its text."""
    asked = [m["content"] for m in before] if isinstance(prompt, str) else [list(before)]
    if before and not is_empty(prompt) and prompt not in asked:
        raise DataError(
            f"{place}: the messages before the answer in '{column}', {shorten(list(before))}, are not those of the "
            f"prompt, {shorten(prompt)}; leave one of them out (data.map)."
        )
