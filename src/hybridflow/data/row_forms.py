"""Records of any columns as the rows that data sets read: prompts, examples with responses, pairs of responses."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybridflow.data.parquet_rows import MEDIA_COLUMNS, reject_media, shorten
from hybridflow.data.prepare.pairs import read_answer, read_sides, require_same_prompt
from hybridflow.data.prepare.prompt_file import as_messages, preference_row, prompt_row
from hybridflow.data.prepare.records import is_empty, messages_of, value_of
from hybridflow.data.sharegpt import chat_tools
from hybridflow.data.tool_messages import stored_conversation
from hybridflow.data.values import plain_row
from hybridflow.errors import DataError
from hybridflow.runtime.observe import get_logger
from hybridflow.runtime.user_import import load_user_function

logger = get_logger(__name__)

Kind = Literal["prompts", "examples", "pairs"]
COLUMNS = {
    "prompts": ("prompt", "answer"),
    "examples": ("prompt", "response", "messages", "tools"),
    "pairs": ("prompt", "chosen", "rejected"),
}
CONVERSATIONS, SYSTEM = "conversations", "system"
"""Columns of ShareGPT: the messages, and the text of a system message before them."""
OTHER_NAMES = {"response": "completion", "messages": CONVERSATIONS, "prompt": CONVERSATIONS, "answer": "ground_truth"}
"""Our name of a column -> its name in TRL, ShareGPT or reward functions, which is read where ours is missing."""
PROMPT_FILE = ("prompt", "data_source", "reward_model")
"""Columns of a prompt file, as `hybridflow prepare` writes it; its other columns are not read."""
DATA_SOURCE = "rows"
"""Data source of rows that name none; a reward function may ignore it."""

Record = dict[str, Any]
Records = Iterable[tuple[str, Record]]
"""(place for errors, columns)"""


@dataclass(frozen=True)
class RowForm:
    """Where the columns of files are found: `data.columns` by our names, and `data.map`, a user's function.

    The function gets a record, and returns one, or None to leave it out.
    """

    columns: Mapping[Any, str] = field(default_factory=dict)
    map: str = ""

    def mapped(self, records: Records) -> Records:
        """Return the records that the user's function makes of these. Raises DataError if it fails."""
        if not self.map:
            return records
        return _mapped(load_user_function(self.map, "data.map", DataError), self.map, records)

    def names(self, kind: Kind, present: Iterable[str]) -> dict[str, str]:
        """Return our name -> the name in files that have the columns `present`, for each column of a kind."""
        names, others = {name: self.columns.get(name, name) for name in COLUMNS[kind]}, set(present)
        for name, other in OTHER_NAMES.items():
            if names.get(name) == name and name not in others and other in others:
                names[name] = other
        return names

    def missing(self, kind: Kind, present: Sequence[str]) -> list[str]:
        """Return our names of the columns that rows of a kind need, and that are not present."""
        names = self.names(kind, present)
        lacks = [name for name, column in names.items() if column.partition(".")[0] not in present]
        if kind == "examples":
            return [] if "messages" not in lacks else [name for name in ("prompt", "response") if name in lacks]
        if kind == "pairs":
            return lacks if {"chosen", "rejected"} & set(lacks) else []
        return [name for name in lacks if name == "prompt"]

    def choose(self, kind: Kind, also: Sequence[str], present: Sequence[str]) -> list[str]:
        """Return which of the present columns are read: all, if others than those that we know may matter."""
        if self.map or self.missing(kind, present):
            return list(present)
        if kind == "prompts" and (self.columns or not set(PROMPT_FILE) <= set(present)):
            return list(present)
        names = self.names(kind, present).values()
        wanted = {*names, *(name.partition(".")[0] for name in names), *PROMPT_FILE, SYSTEM, *also, *MEDIA_COLUMNS}
        return [name for name in dict.fromkeys(present) if name in wanted]


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
        yield place, plain_row(made, place)


def rows_of(records: Sequence[tuple[str, Record]], kind: Kind, form: RowForm, split: str) -> list[Record]:
    """Return records as rows of this kind. Raises DataError for a missing, empty or wrong column."""
    for place, record in records:
        reject_media(place, record)
    names = form.names(kind, records[0][1] if records else ())
    if kind == "pairs":
        return [_pair_row(record, names, place) for place, record in records]
    if kind == "prompts":
        has_answers = names["answer"] != "answer" or any(_has(record, "answer") for _, record in records)
        if not has_answers:
            names["answer"] = ""
        return [_prompt_row(record, names, place, split, i) for i, (place, record) in enumerate(records)]
    if not records or names["messages"].partition(".")[0] not in records[0][1]:
        return [_example_row(record, names, place) for place, record in records]
    if names["response"] in records[0][1]:
        logger.warning("the rows have the columns `messages` and `response`; `response` is ignored")
    return [_conversation_row(record, names, place) for place, record in records]


def _prompt_row(record: Record, names: Mapping[str, str], place: str, split: str, index: int) -> Record:
    prompt, answer = names["prompt"], names["answer"]
    asked = _filled(record, prompt, place)
    if prompt == "prompt" and answer in ("", "answer") and all(name in record for name in PROMPT_FILE):
        truth = record["reward_model"]
        if not isinstance(truth, dict) or truth.get("ground_truth") is None:
            raise DataError(
                f"{place}: column 'reward_model' must hold style and ground_truth, as in "
                f"{{'style': 'rule', 'ground_truth': '72'}}, got {shorten(truth)}."
            )
        return {**record, "prompt": as_messages(asked)} if isinstance(asked, str) else record
    messages = messages_of(asked, prompt, place)
    if prompt == CONVERSATIONS and messages[-1]["role"] == "assistant":
        raise DataError(
            f"{place}: '{prompt}' ends with an answer, but a prompt ends before it; make `prompt` and `answer` of it "
            "with data.map."
        )
    row = prompt_row(
        data_source=str(_filled({"data_source": DATA_SOURCE, **record}, "data_source", place)),
        prompt=messages,
        ground_truth=_filled(record, answer, place) if answer else "",
        split=split,
        index=index,
        ability="",
    )
    used = {prompt.partition(".")[0], answer.partition(".")[0], "data_source"}
    others = {name: value for name, value in record.items() if name not in used}
    return {**row, "extra_info": {"split": split, "index": index, **others}}


def _conversation_row(record: Record, names: Mapping[str, str], place: str) -> Record:
    messages = _filled(record, names["messages"], place)
    tools = value_of(record, names["tools"], place) if _has(record, names["tools"]) else None
    if names["messages"] == CONVERSATIONS:
        tools, system = chat_tools(tools), record.get(SYSTEM)
        if isinstance(messages, list) and isinstance(system, str) and system:
            messages = [{"role": "system", "content": system}, *messages]
    return stored_conversation(messages, tools, place)


def _example_row(record: Record, names: Mapping[str, str], place: str) -> Record:
    given = _filled(record, names["prompt"], place)
    prompt, column = messages_of(given, names["prompt"], place), names["response"]
    before, response = read_answer(_answer(record, column, place), column, place)
    require_same_prompt(given if isinstance(given, str) else prompt, before, column, place)
    return {"prompt": before or prompt, "response": response}


def _pair_row(record: Record, names: Mapping[str, str], place: str) -> Record:
    for side in ("chosen", "rejected"):
        _answer(record, names[side], place)
    asked, chosen, asked_too, rejected = read_sides(record, names, place)
    if asked != asked_too:
        raise DataError(
            f"{place}: the messages before the answers in '{names['chosen']}' and '{names['rejected']}' differ; a pair "
            "has one prompt, so leave the row out (data.map)."
        )
    if not asked:
        raise DataError(
            f"{place}: '{names['prompt']}' is missing or empty, and '{names['chosen']}' and '{names['rejected']}' do "
            "not begin with the same prompt; give the row one."
        )
    if _has(record, names["prompt"]) and not is_empty(given := value_of(record, names["prompt"], place)):
        given = given if isinstance(given, str) else messages_of(given, names["prompt"], place)
        require_same_prompt(given, asked, names["chosen"], place)
    return preference_row(asked, chosen, rejected)


def _has(record: Mapping[str, Any], column: str) -> bool:
    try:
        return value_of(record, column, "") is not None
    except DataError:
        return False


def _answer(record: Mapping[str, Any], column: str, place: str) -> Any:
    """Return an answer, which may be an empty text: it ends at once."""
    return value if (value := value_of(record, column, place)) == "" else _filled(record, column, place)


def _filled(record: Mapping[str, Any], column: str, place: str) -> Any:
    value = value_of(record, column, place)
    if is_empty(value):
        raise DataError(f"{place}: '{column}' is empty; give it a value, or leave the row out.")
    return value
