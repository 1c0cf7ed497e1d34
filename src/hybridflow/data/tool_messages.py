"""Conversations with tools: the columns `messages` and `tools` of a row, and how columnar files keep them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.data.chat_prompts import Message, Schema, read_messages, with_texts
from hybridflow.data.parquet_rows import Row, shorten, shorten_text
from hybridflow.data.sharegpt import chat_messages
from hybridflow.errors import DataError

CALL = '{"type": "function", "function": {"name": "...", "arguments": {...}}}'
SCHEMA = '{"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}'


def uses_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> bool:
    """Return whether a conversation has tools, calls, or results of tools."""
    return bool(tools) or any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def read_conversation(row: Row) -> tuple[list[Message], list[Schema]]:
    """Return the messages of a row, with the arguments of calls as dicts, and its tools, none if the row has none.

    Raises DataError, naming the row and the value, if one is malformed.
    """
    place = row.place
    given = _listed(row.values["messages"], "messages", place)
    if isinstance(given, list):
        given = chat_messages(given, place)
    messages = read_messages(Row(place, {"messages": given}), "messages")
    messages = [_with_calls(message, number, place) for number, message in enumerate(messages)]
    return messages, _read_tools(row.values.get("tools"), place)


def stored_conversation(messages: Any, tools: Any, place: str) -> dict[str, Any]:
    """Return the columns of a conversation as parquet keeps them: tools and arguments of calls are JSON texts.

    A column of parquet has one type, so that objects of other keys would get each other's keys.
    """
    checked, schemas = read_conversation(Row(place, {"messages": messages, "tools": tools}))
    stored = {"messages": [with_texts(message) for message in checked]}
    return {**stored, **({"tools": json.dumps(schemas, ensure_ascii=False)} if schemas else {})}


def _listed(value: Any, column: str, place: str) -> Any:
    """Return a column's value, or the list that its JSON text holds."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        reason = shorten_text(str(error))
        raise DataError(
            f"{place}: column '{column}' must be a list, or a JSON text of one, got {shorten(value)} ({reason})."
        ) from error


def _read_tools(value: Any, place: str) -> list[Schema]:
    tools = _listed(value, "tools", place) if value not in (None, "", []) else []
    if not isinstance(tools, list):
        raise DataError(
            f"{place}: column 'tools' must be a list of JSON schemas, got {shorten(tools)}; expected [{SCHEMA}]."
        )
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise DataError(
                f"{place}: tool {number} of 'tools' needs a function with a name, as in {SCHEMA}; got {shorten(tool)}."
            )
    return tools


def _with_calls(message: Message, number: int, place: str) -> Message:
    """Return a message with checked calls; one without calls has no `tool_calls`, which some templates ask for."""
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    where = f"{place}: message {number} of 'messages'"
    if message["role"] != "assistant" or not isinstance(calls, list):
        raise DataError(
            f"{where}, of the role {message['role']}, has tool_calls={shorten(calls)}; expected a list of calls in a "
            "message of the assistant."
        )
    return {**message, "tool_calls": [_read_call(call, f"{where}: call {n}") for n, call in enumerate(calls)]}


def _read_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{place} needs a function with a name, as in {CALL}; got {shorten(call)}.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{place}, of {function['name']!r}: arguments are not JSON: {shorten(arguments)} "
                f"({shorten_text(str(error))}); expected an object, or a JSON text of one."
            ) from error
    if not isinstance(arguments, dict):
        raise DataError(
            f"{place}, of {function['name']!r}: arguments must be an object, or a JSON text of one, got "
            f"{shorten(arguments)}; a call without arguments has {{}}."
        )
    kept = {key: value for key, value in call.items() if value is not None}
    return {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}
