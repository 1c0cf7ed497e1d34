"""Anthropic's messages: the body of a request, the response, the events of a stream and the form of errors."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hybridflow.environments.agents import bodies
from hybridflow.environments.agents.bodies import Body, Items, Parts, TextPart, json_text, text_of
from hybridflow.environments.agents.chat import ChatReply, ChatRequest, RefusedError
from hybridflow.environments.episodes.messages import ToolCall


class _AnthropicThinking(Body):
    harmless = frozenset({"signature"})
    type: Literal["thinking"]
    thinking: str


class _AnthropicToolUse(Body):
    harmless = frozenset({"cache_control"})
    type: Literal["tool_use"]
    id: bodies.Name
    name: bodies.Name
    input: dict[str, Any]


class _AnthropicResult(Body):
    harmless = frozenset({"cache_control"})
    type: Literal["tool_result"]
    tool_use_id: bodies.Name
    content: Parts = Field(default_factory=list)
    is_error: bool = False

    def text(self) -> str:
        """Return what the model reads; an error begins as those of the tools of an environment do."""
        text = text_of(self.content)
        return f"error: {text}" if self.is_error and not text.startswith("error:") else text


class _AnthropicUser(Body):
    role: Literal["user", "system"]
    content: Annotated[Items[Annotated[TextPart | _AnthropicResult, Field(discriminator="type")]], bodies.as_parts]


class _AnthropicTurn(Body):
    role: Literal["assistant"]
    content: Annotated[
        Items[Annotated[TextPart | _AnthropicThinking | _AnthropicToolUse, Field(discriminator="type")]],
        bodies.as_parts,
    ]


class _AnthropicTool(Body):
    harmless = frozenset({"cache_control", "strict", "eager_input_streaming"})
    type: Literal["custom"] = "custom"
    name: bodies.Name
    description: str = ""
    input_schema: dict[str, Any]
    defer_loading: Literal[False] = False


class _AnthropicToolChoice(Body):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: Literal[False] = False


class _AnthropicThought(Body):
    type: Literal["disabled"]


class AnthropicMessages(bodies.ChatBody):
    """The body of POST /v1/messages."""

    keep_alive: ClassVar[str] = 'event: ping\ndata: {"type":"ping"}\n\n'
    harmless = frozenset({"cache_control", "metadata", "service_tier"})
    messages: Annotated[
        Items[Annotated[_AnthropicUser | _AnthropicTurn, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    max_tokens: bodies.Count
    system: Parts = Field(default_factory=list)
    tools: Items[_AnthropicTool] = Field(default_factory=list)
    tool_choice: _AnthropicToolChoice = Field(default_factory=lambda: _AnthropicToolChoice(type="auto"))
    stop_sequences: bodies.Stops = Field(default_factory=list)
    thinking: _AnthropicThought | None = None

    def request(self) -> ChatRequest:
        """Return the request without the words of the protocol."""
        conversation = bodies.Conversation()
        if self.system:
            conversation.say("system", text_of(self.system))
        for message in self.messages:
            if isinstance(message, _AnthropicTurn):
                thoughts = [each.thinking for each in message.content if isinstance(each, _AnthropicThinking)]
                uses = [each for each in message.content if isinstance(each, _AnthropicToolUse)]
                calls = [(each.id, ToolCall(each.name, each.input)) for each in uses]
                conversation.turn(_text(message.content), "\n".join(thoughts), calls)
                continue
            results = [each for each in message.content if isinstance(each, _AnthropicResult)]
            if any(isinstance(each, _AnthropicResult) for each in message.content[len(results) :]):
                raise bodies.invalid("messages: the tool_result blocks of a message must come before its other blocks")
            for result in results:
                conversation.result(result.tool_use_id, result.text())
            if len(results) < len(message.content) or not results:
                conversation.say(message.role, _text(message.content))
        return self._request(
            conversation,
            [bodies.tool_schema(tool.name, tool.description, tool.input_schema) for tool in self.tools],
            may_call=self.tool_choice.type == "auto",
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences),
        )

    def response(self, reply: ChatReply) -> dict[str, Any]:
        """Return a message."""
        content = [{**block, field: value} for block, field, value in _blocks(reply)]
        return {**self._head(reply), "content": content, **_ending(reply), "usage": _usage(reply)}

    def events(self, reply: ChatReply) -> Iterator[str]:
        """Yield the start of the message, its blocks and its end."""
        start = {**self._head(reply), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**start, "usage": {**_usage(reply), "output_tokens": 0}})
        for index, (block, field, value) in enumerate(_blocks(reply)):
            yield _event("content_block_start", index=index, content_block=block)
            kind, key = ("input_json_delta", "partial_json") if field == "input" else (f"{field}_delta", field)
            text = json_text(value) if field == "input" else value
            yield _event("content_block_delta", index=index, delta={"type": kind, key: text})
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_ending(reply), usage=_usage(reply))
        yield _event("message_stop")

    @staticmethod
    def error(error: RefusedError) -> dict[str, Any]:
        """Return an error in Anthropic's form."""
        return {"type": "error", "error": {"type": bodies.error_type(error), "message": str(error)}}

    @classmethod
    def error_event(cls, error: RefusedError) -> str:
        """Return the event that ends a stream with an error."""
        return _event(**{"kind": "error", **cls.error(error)})

    def _head(self, reply: ChatReply) -> dict[str, Any]:
        return {"id": f"msg_{reply.turn_id}", "type": "message", "role": "assistant", "model": self.model}


class AnthropicCount(AnthropicMessages):
    """The body of POST /v1/messages/count_tokens."""

    max_tokens: bodies.Count = 1


def _text(blocks: Sequence[Body]) -> str:
    return text_of(each for each in blocks if isinstance(each, TextPart))


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json_text({'type': kind, **fields})}\n\n"


def _blocks(reply: ChatReply) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield each block without its contents, and the field that holds them."""
    if reply.said.reasoning:
        yield {"type": "thinking", "thinking": "", "signature": ""}, "thinking", reply.said.reasoning
    if reply.said.content:
        yield {"type": "text", "text": ""}, "text", reply.said.content
    for number, call in enumerate(reply.said.calls):
        call_id = f"toolu_{reply.turn_id}_{number}"
        yield {"type": "tool_use", "id": call_id, "name": call.name, "input": {}}, "input", call.arguments


def _ending(reply: ChatReply) -> dict[str, str | None]:
    if reply.cut or reply.said.calls:
        return {"stop_reason": "max_tokens" if reply.cut else "tool_use", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if reply.stopped_at else "end_turn", "stop_sequence": reply.stopped_at}


def _usage(reply: ChatReply) -> dict[str, int]:
    return {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.token_ids)}
