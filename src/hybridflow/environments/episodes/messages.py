"""What a model says in one turn, as a program reads it."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A chat message: `role` (system, user, assistant or tool) and `content`; an assistant may have `tool_calls`."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. `is_text`: the format writes every argument as text, whatever its type."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    is_text: bool = False


@dataclass(frozen=True)
class AssistantTurn:
    """A turn of the assistant: its text, its reasoning, its calls in order, and what is wrong with other calls."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()

    def message(self) -> Message:
        """Return the turn as a chat message, for a chat template."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message

    def add_to(self, messages: list[Message]) -> None:
        """Append the turn to a conversation, in place of a message that the prompt has begun and it continues."""
        begun = messages.pop() if messages and messages[-1]["role"] == "assistant" else {}
        messages.append({**begun, **self.message()})
