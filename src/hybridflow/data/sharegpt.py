"""Conversations of ShareGPT, whose messages have `from` and `value`, as chat messages with a role and a content."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.errors import DataError

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
CALL = "function_call"
"""Sender of messages whose text is a tool call, or a list of them, as JSON."""


def chat_messages(messages: Sequence[Any], place: str) -> list[Any]:
    """Return messages with roles for those of ShareGPT, and others as they are; raise DataError for an unknown role."""
    return [_chat_message(message, f"{place}: message {number}") for number, message in enumerate(messages)]


def _chat_message(message: Any, place: str) -> Any:
    if not isinstance(message, Mapping) or "role" in message or not {"from", "value"} <= message.keys():
        return message
    sender, text = message["from"], message["value"]
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    if sender == CALL:
        return {"role": "assistant", "content": "", "tool_calls": _calls(text, place), **others}
    if not isinstance(sender, str) or sender not in ROLES:
        raise DataError(f"{place} is from {sender!r:.100}; expected one of {', '.join((*ROLES, CALL))}.")
    return {"role": ROLES[sender], "content": text, **others}


def _calls(text: Any, place: str) -> list[dict[str, Any]]:
    try:
        calls = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{place} is from {CALL!r}, but is not the JSON of a call: {text!r:.100} ({error}).") from error
    return [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]


def chat_tools(tools: Any) -> Any:
    """Return the tools of a conversation of ShareGPT, bare functions or their JSON, as schemas of tools."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return tools  # the error of the schemas says what is wrong
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": tool} if isinstance(tool, Mapping) and "function" not in tool else tool
        for tool in tools
    ]
