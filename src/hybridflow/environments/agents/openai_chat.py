"""OpenAI's chat completions: the body of a request, the response, the chunks of a stream and the form of errors."""

import time
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hybridflow.environments.agents import bodies
from hybridflow.environments.agents.bodies import Body, Items, Parts, json_text, text_of
from hybridflow.environments.agents.chat import ChatReply, ChatRequest, RefusedError
from hybridflow.environments.episodes.messages import ToolCall


class _OpenAIFunction(Body):
    harmless = frozenset({"strict"})  # the model writes the arguments, as it does for OpenAI's models without `strict`
    name: bodies.Name
    description: str = ""
    parameters: dict[str, Any] | None = None


class _OpenAITool(Body):
    type: Literal["function"]
    function: _OpenAIFunction


class _OpenAICalled(Body):
    harmless = frozenset({"parsed_arguments"})  # of OpenAI's client, beside the text
    name: bodies.Name
    arguments: str


class _OpenAICall(Body):
    harmless = frozenset({"index"})  # of a call that was put together from a stream
    id: bodies.Name
    type: Literal["function"] = "function"
    function: _OpenAICalled

    def call(self) -> ToolCall:
        what = f"messages: {ascii(self.function.arguments)[:100]}, the arguments of a call of {self.function.name!r},"
        arguments = bodies.parse_json(self.function.arguments, what)
        if not isinstance(arguments, dict):
            raise bodies.invalid(f"{what} must be the text of a JSON object")
        return ToolCall(self.function.name, arguments)


class _OpenAISaid(Body):
    role: Literal["system", "developer", "user"]
    content: Parts


class _OpenAITurn(Body):
    harmless = frozenset({"parsed"})
    role: Literal["assistant"]
    content: Parts = Field(default_factory=list)
    reasoning_content: str = ""
    tool_calls: Items[_OpenAICall] = Field(default_factory=list)
    annotations: bodies.Empty = Field(default_factory=list)


class _OpenAIResult(Body):
    role: Literal["tool"]
    content: Parts
    tool_call_id: bodies.Name
    name: bodies.Name | None = None


class _OpenAIFormat(Body):
    type: Literal["text"]


class _OpenAIStreamOptions(Body):
    harmless = frozenset({"include_obfuscation"})
    include_usage: bool = False


class OpenAIChat(bodies.ChatBody):
    """The body of POST /v1/chat/completions."""

    keep_alive: ClassVar[str] = ": the model works\n\n"
    harmless = frozenset(
        ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
    )
    messages: Annotated[
        Items[Annotated[_OpenAISaid | _OpenAITurn | _OpenAIResult, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    tools: Items[_OpenAITool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    max_tokens: bodies.Count | None = None
    max_completion_tokens: bodies.Count | None = None
    stop: bodies.Stops = Field(default_factory=list)
    logprobs: bool = False
    return_token_ids: bool = False  # of vLLM
    stream_options: _OpenAIStreamOptions = Field(default_factory=_OpenAIStreamOptions)
    # Of each of these, only the value that changes nothing.
    n: Literal[1] = 1
    top_logprobs: Literal[0] = 0
    parallel_tool_calls: Literal[True] = True
    response_format: _OpenAIFormat | None = None
    modalities: Items[Literal["text"]] = Field(default_factory=list)
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    def request(self) -> ChatRequest:
        """Return the request without the words of the protocol."""
        conversation = bodies.Conversation()
        for message in self.messages:
            text = text_of(message.content)
            if isinstance(message, _OpenAITurn):
                calls = [(call.id, call.call()) for call in message.tool_calls]
                conversation.turn(text, message.reasoning_content, calls)
            elif isinstance(message, _OpenAIResult):
                conversation.result(message.tool_call_id, text, message.name)
            else:
                conversation.say("user" if message.role == "user" else "system", text)
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) == 2:
            raise bodies.invalid(f"max_tokens={self.max_tokens} is not max_completion_tokens; send one of them")
        functions = [(each.function.name, each.function.description, each.function.parameters) for each in self.tools]
        return self._request(
            conversation,
            [bodies.tool_schema(*each) for each in functions],
            may_call=self.tool_choice == "auto",
            max_tokens=next(iter(limits), None),
            stop=tuple(self.stop),
        )

    def response(self, reply: ChatReply) -> dict[str, Any]:
        """Return a chat completion."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.said.content, "refusal": None}
        if reply.said.reasoning:
            message["reasoning_content"] = reply.said.reasoning
        if calls := _calls(reply):
            message |= {"content": reply.said.content or None, "tool_calls": calls}
        choice = {"index": 0, "message": message, **self._ending(reply)}
        head = {**self._head(reply, "chat.completion"), **self._prompt_ids(reply)}
        return {**head, "choices": [choice], "usage": _usage(reply)}

    def events(self, reply: ChatReply) -> Iterator[str]:
        """Yield chunks; the last one has the reason of the end and the log-probs."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        said = {"reasoning_content": reply.said.reasoning, "content": reply.said.content}
        deltas += [{name: text} for name, text in said.items() if text]
        deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(_calls(reply))]
        choices = [{"delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        choices.append({"delta": {}, **self._ending(reply)})
        head = self._head(reply, "chat.completion.chunk")
        for choice in choices:
            first = self._prompt_ids(reply) if choice is choices[0] else {}
            yield _event({**head, "choices": [{"index": 0, **choice}], **first})
        if self.stream_options.include_usage:
            yield _event({**head, "choices": [], "usage": _usage(reply)})
        yield "data: [DONE]\n\n"

    @staticmethod
    def error(error: RefusedError) -> dict[str, Any]:
        """Return an error in OpenAI's form."""
        return {"error": {"message": str(error), "type": bodies.error_type(error), "param": None, "code": error.code}}

    @classmethod
    def error_event(cls, error: RefusedError) -> str:
        """Return the event that ends a stream with an error."""
        return _event(cls.error(error))

    def _head(self, reply: ChatReply, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{reply.turn_id}", "object": kind, "created": int(time.time()), "model": self.model}

    def _prompt_ids(self, reply: ChatReply) -> dict[str, Any]:
        return {"prompt_token_ids": reply.prompt_ids} if self.return_token_ids else {}

    def _ending(self, reply: ChatReply) -> dict[str, Any]:
        own = {"token_ids": reply.token_ids} if self.return_token_ids else {}
        tokens = [
            {"token": text, "logprob": max(value, -9999.0), "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(map(reply.text_of, reply.token_ids), reply.log_probs, strict=True)
        ]
        return own | {
            "logprobs": {"content": tokens, "refusal": None} if self.logprobs else None,
            "finish_reason": "length" if reply.cut else "tool_calls" if reply.said.calls else "stop",
        }


def _event(data: dict[str, Any]) -> str:
    return f"data: {json_text(data)}\n\n"


def _calls(reply: ChatReply) -> list[dict[str, Any]]:
    functions = [{"name": call.name, "arguments": json_text(call.arguments)} for call in reply.said.calls]
    return [
        {"id": f"call_{reply.turn_id}_{number}", "type": "function", "function": function}
        for number, function in enumerate(functions)
    ]


def _usage(reply: ChatReply) -> dict[str, int]:
    prompt, completion = len(reply.prompt_ids), len(reply.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
