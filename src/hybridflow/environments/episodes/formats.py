"""How families of models write their reasoning and their calls of tools: from the text of a turn to `AssistantTurn`.

No text is an error: what cannot be read as a call is listed in `malformed`, with a reason for the model.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.episodes.messages import AssistantTurn, ToolCall

MAX_CALLS = 64
"""Calls of one turn that are read; a model that repeats itself writes thousands."""


MAX_NESTING = 64
"""Lists and objects inside each other in the arguments of a call."""


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls. `marks`: texts of a chat template, all of which the format's templates have."""

    name: str
    marks: tuple[str, ...]
    read: Callable[[str], tuple[str, list[ToolCall], list[str]]]

    def parse(self, text: str, *, is_reasoning: bool | None = None) -> AssistantTurn:
        """Return what a turn's text says, without the token that ended it; a call within reasoning is none.

        `is_reasoning`: whether the prompt opened the reasoning; None: if the text closes some that it did not open.
        """
        reasoning, rest = _split_reasoning(text, is_reasoning)
        content, calls, malformed = self.read(rest)
        return AssistantTurn(content.strip(), reasoning, tuple(calls), tuple(malformed))


def parse_plain(text: str, *, is_reasoning: bool | None = None) -> AssistantTurn:
    """Return a turn of a model without tools: reasoning and text."""
    reasoning, rest = _split_reasoning(text, is_reasoning)
    return AssistantTurn(rest.strip(), reasoning)


def format_of(template: str) -> ToolFormat | None:
    """Return the format of a chat template's calls; None if it is none that is known."""
    return next((each for each in FORMATS if all(mark in template for mark in each.marks)), None)


def is_open(text: str) -> bool:
    """Return whether a text ends within reasoning."""
    return text.rfind("<think>") > text.rfind("</think>")


def _split_reasoning(text: str, is_reasoning: bool | None) -> tuple[str, str]:
    """Return reasoning and answer, each of one or several parts."""
    if is_reasoning is None:
        is_reasoning = "<think>" not in text.partition("</think>")[0] and "</think>" in text
    thoughts, said = list[str](), list[str]()
    rest = text.lstrip().removeprefix("<think>") if is_reasoning else text
    while rest:
        part, _, rest = rest.partition("</think>" if is_reasoning else "<think>")
        (thoughts if is_reasoning else said).append(part)
        is_reasoning = not is_reasoning
    return "\n".join(filter(None, map(str.strip, thoughts))), "".join(said)


def _call_of(value: Any, arguments_key: str) -> ToolCall | str:
    """Return the call of a JSON value, or what is wrong with it."""
    if not isinstance(value, dict):
        return f"a call must be a JSON object, got {type(value).__name__}"
    name, arguments = value.get("name"), value.get(arguments_key, {})
    if not isinstance(name, str) or not name or _unfit(name):
        return 'a call needs a "name", a text'
    unknown = [key for key in value if key not in ("name", arguments_key) and (key, value[key]) != ("type", "function")]
    if unknown:
        shown = ascii(unknown[0])[:100]
        return f'the call of {name[:100]} has the unknown key {shown}; it has "name" and "{arguments_key}"'
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return f'"{arguments_key}" of {name} is a text that is not JSON'
    if not isinstance(arguments, dict):
        return f'"{arguments_key}" of {name} must be a JSON object'
    if problem := _unfit(arguments):
        return f'"{arguments_key}" of {name} has {problem}'
    return ToolCall(name, arguments)


def _unfit(value: Any, depth: int = MAX_NESTING) -> str:
    """Return what a value of Python's JSON has that texts and other JSON cannot hold; empty if there is nothing."""
    if isinstance(value, str):
        return "half of a character" if any("\ud800" <= letter <= "\udfff" for letter in value) else ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"the number {value}"
    if not isinstance(value, dict | list):
        return ""
    if not depth:
        return f"more than {MAX_NESTING} lists and objects inside each other"
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return next(filter(None, (_unfit(each, depth - 1) for each in inner)), "")


def _json_call(text: str, arguments_key: str = "arguments") -> ToolCall | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"a call is not JSON: {str(error)[:100]}"
    return _call_of(value, arguments_key)


def _read_between(
    text: str, begin: str, end: str, read: Callable[[str], ToolCall | str]
) -> tuple[str, list[ToolCall], list[str]]:
    """Read the calls between two marks; return the text outside of them, the calls, and what is wrong with others."""
    outside, calls, malformed = [], list[ToolCall](), list[str]()
    while True:
        before, mark, rest = text.partition(begin)
        outside.append(before)
        if not mark:
            break
        inner, closed, text = rest.partition(end)
        found = read(inner.strip()) if closed else f"a call that begins with {begin} has no {end}"
        (calls if isinstance(found, ToolCall) else malformed).append(found)  # pyright: ignore[reportArgumentType]
        if not closed or len(calls) + len(malformed) >= MAX_CALLS:
            break
    return "".join(outside), calls, malformed


def _read_hermes(text: str) -> tuple[str, list[ToolCall], list[str]]:
    """Read <tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen2.5, Qwen3)."""
    return _read_between(text, "<tool_call>", "</tool_call>", _json_call)


def _read_glm(text: str) -> tuple[str, list[ToolCall], list[str]]:
    """Read <tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument (GLM-4.5)."""

    def read(inner: str) -> ToolCall | str:
        name, *pairs = inner.split("<arg_key>")
        name, arguments = name.strip(), dict[str, Any]()
        if not name:
            return "a call needs the name of a tool after <tool_call>"
        for pair in pairs:
            key, _, after = pair.partition("</arg_key>")
            before, mark, after = after.partition("<arg_value>")
            value, closed, other = after.partition("</arg_value>")
            if before.strip() or not mark or not closed:
                return f"an <arg_key> of {name} has no </arg_key> with an <arg_value>"
            if other.strip():
                return f"the call of {name} has {other.strip()[:100]!r} after an <arg_value>"
            arguments[key.strip()] = value.strip("\n")
        return ToolCall(name, arguments, is_text=True)

    return _read_between(text, "<tool_call>", "</tool_call>", read)


def _read_deepseek(text: str) -> tuple[str, list[ToolCall], list[str]]:
    """Read the calls of DeepSeek-V3 and R1 (a type, a name and a JSON block), and of V3.1 (a name and JSON)."""

    def read(inner: str) -> ToolCall | str:
        before, mark, after = inner.partition("<｜tool▁sep｜>")
        if not mark:
            return "a call has no <｜tool▁sep｜>"
        block = re.fullmatch(r"([^\n]+)\n```json\n(.*)\n```", after.strip(), re.DOTALL)
        if block and before.strip() != "function":
            return f"the call of {block[1].strip()[:100]} has the unknown type {before.strip()[:100]!r}; use function"
        name, arguments = block.groups() if block else (before, after)
        try:
            value = {"name": name.strip(), "arguments": json.loads(arguments)}
        except (ValueError, RecursionError) as error:
            return f"the arguments of {name.strip()[:100]} are not JSON: {str(error)[:100]}"
        return _call_of(value, "arguments")

    content, calls, malformed = _read_between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read)
    return content.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", ""), calls, malformed


def _read_llama3(text: str) -> tuple[str, list[ToolCall], list[str]]:
    """Read {"name": ..., "parameters": {...}}, alone or after <|python_tag|>, several with ; between (Llama 3)."""
    before, mark, after = text.partition("<|python_tag|>")
    body = (after if mark else text).strip()
    if not mark and not body.startswith("{"):
        return text, [], []
    decoder, calls, malformed, is_meant = json.JSONDecoder(), list[ToolCall](), list[str](), bool(mark)
    while body and len(calls) + len(malformed) < MAX_CALLS:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            malformed.append(f"a call is not JSON: {str(error)[:100]}")
            break
        found = _call_of(value, "parameters")
        is_meant = is_meant or ("name" in value and not {"parameters", "arguments"}.isdisjoint(value))
        (calls if isinstance(found, ToolCall) else malformed).append(found)  # pyright: ignore[reportArgumentType]
        body = body[end:].lstrip("; \n")
    if not is_meant and not calls:  # an answer that is JSON, not a call
        return text, [], []
    return before if mark else "", calls, malformed


FORMATS = (
    ToolFormat("deepseek", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), _read_deepseek),
    ToolFormat("glm", ("<tool_call>", "<arg_key>"), _read_glm),
    ToolFormat("hermes", ("<tool_call>", "</tool_call>"), _read_hermes),
    ToolFormat("llama3", ("<|start_header_id|>", '"parameters"'), _read_llama3),
)
"""The formats that are known; of two whose marks a template has, the first."""
