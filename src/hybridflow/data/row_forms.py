"""Records of any columns as the rows that data sets read: prompts, examples with responses, pairs of responses."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybridflow.data.prepare.prompt_file import prompt_row
from hybridflow.data.prepare.records import is_empty, messages_of, value_of
from hybridflow.data.tool_messages import stored_conversation
from hybridflow.errors import DataError
from hybridflow.runtime.user_import import load_user_function

Kind = Literal["prompts", "examples", "pairs"]
COLUMNS = {
    "prompts": ("prompt", "answer"),
    "examples": ("prompt", "response", "messages", "tools"),
    "pairs": ("prompt", "chosen", "rejected"),
}
DATA_SOURCE = "rows"
"""Data source of rows that name none; a reward function may ignore it."""

Records = Iterable[tuple[str, dict[str, Any]]]
"""(place for errors, columns)"""


@dataclass(frozen=True)
class RowForm:
    """Where the columns of files are found: `data.columns` by our names, and `data.map`, a user's function.

    The function gets a record, and returns one, or None to leave it out.
    """

    columns: Mapping[Any, str] = field(default_factory=dict)
    map: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether files are read as they are."""
        return not self.columns and not self.map

    def mapped(self, records: Records) -> Records:
        """Return the records that the user's function makes of these. Raises DataError if it fails."""
        if not self.map:
            return records
        return _mapped(load_user_function(self.map, "data.map", DataError), self.map, records)


def _mapped(function: Callable[..., Any], name: str, records: Records) -> Records:
    for place, record in records:
        try:
            made = function(record)
        except Exception as error:  # of the user's function
            raise DataError(f"{place}: data.map='{name}' failed: {type(error).__name__}: {error}.") from error
        if made is None:
            continue
        if not isinstance(made, Mapping):
            raise DataError(f"{place}: data.map='{name}' returned a {type(made).__name__}; expected a dict, or None.")
        yield place, dict(made)


def rows_of(
    records: Sequence[tuple[str, dict[str, Any]]], kind: Kind, columns: Mapping[str, str], split: str
) -> list[dict[str, Any]]:
    """Return records as rows of this kind. Raises DataError for a missing, empty or wrong column.

    `columns` names the columns of `COLUMNS[kind]` that have another name in the records.
    """
    names = {name: columns.get(name, name) for name in COLUMNS[kind]}
    if kind == "examples" and records and names["messages"].partition(".")[0] in records[0][1]:
        return [_conversation_row(record, names, place) for place, record in records]
    if kind == "prompts":
        has_answers = any(_has(record, names["answer"]) for _, record in records)
        return [
            _prompt_row(record, place, split, i, names["prompt"], names["answer"] if has_answers else "")
            for i, (place, record) in enumerate(records)
        ]
    return [_example_row(record, names, place) for place, record in records]


def _prompt_row(record: dict[str, Any], place: str, split: str, index: int, prompt: str, answer: str) -> dict[str, Any]:
    if {"data_source", "prompt", "reward_model"} <= record.keys():  # a row of a prompt file
        return record
    question = _filled(record, prompt, place)
    truth = _filled(record, answer, place) if answer else ""
    row = prompt_row(
        data_source=str(record.get("data_source", DATA_SOURCE)),
        prompt=messages_of(question, prompt, place),
        ground_truth=truth,
        split=split,
        index=index,
        ability="",
    )
    used = {prompt.partition(".")[0], answer.partition(".")[0], "data_source"}
    others = {name: value for name, value in record.items() if name not in used}
    return {**row, "extra_info": {"split": split, "index": index, **others}}


def _conversation_row(record: dict[str, Any], names: Mapping[str, str], place: str) -> dict[str, Any]:
    tools = value_of(record, names["tools"], place) if _has(record, names["tools"]) else None
    return stored_conversation(_filled(record, names["messages"], place), tools, place)


def _example_row(record: dict[str, Any], names: Mapping[str, str], place: str) -> dict[str, Any]:
    prompt = names["prompt"]
    row: dict[str, Any] = {"prompt": messages_of(_filled(record, prompt, place), prompt, place)}
    for name, column in list(names.items())[1:]:
        if name in ("messages", "tools"):
            continue
        if column == "response" and column not in record and "completion" in record:  # as TRL names it
            column = "completion"
        row[name] = _text_of(_filled(record, column, place), row["prompt"])
        if not isinstance(row[name], str):
            raise DataError(f"{place}: '{column}' must be a text, got {row[name]!r:.100}.")
    return row


def _text_of(value: Any, prompt: list[dict[str, str]]) -> Any:
    """Return the text of an answer that is a message of the assistant, alone or after the prompt's; else the value."""
    if not isinstance(value, list) or not value or not isinstance(value[-1], dict):
        return value
    is_answer = value[-1].get("role") == "assistant" and value[:-1] in ([], prompt)
    return value[-1].get("content") if is_answer else value


def _has(record: Mapping[str, Any], column: str) -> bool:
    try:
        return value_of(record, column, "") is not None
    except DataError:
        return False


def _filled(record: Mapping[str, Any], column: str, place: str) -> Any:
    value = value_of(record, column, place)
    if is_empty(value):
        raise DataError(f"{place}: '{column}' is empty; give it a value, or leave the row out.")
    return value
