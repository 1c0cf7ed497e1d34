"""What the bodies of both protocols share: strict JSON, a conversation as a chat template takes it, errors by field.

A body lists what is supported and what changes no token. Any other field is refused, because it would be ignored.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import from_json

from hybridflow.environments.agents.chat import ChatRequest, RefusedError
from hybridflow.environments.episodes.messages import AssistantTurn, Message, ToolCall

MAX_OBJECTS = 30_000
"""Messages, parts of them, calls and tools of a request."""
MAX_FIELDS = 100
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_MAYBE_INFINITE = re.compile(rb"\d[eE]\+?\d{3}|\d{300}")
_ERRORS = {401: "authentication", 404: "not_found", 429: "rate_limit"}

Item = TypeVar("Item")
Items = Annotated[list[Item], FailFast()]
"""A list that is read up to its first error, because a hostile one has a million."""
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Empty = Annotated[list[Any], Field(max_length=0)]
Stops = Annotated[
    Items[Annotated[str, Field(min_length=1, max_length=1000)]],
    Field(max_length=16),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]


class Body(BaseModel):
    """An object of a request. A null is the same as no value; `harmless` fields change no token and are not read."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context is not None and next(info.context) > MAX_OBJECTS:
            raise ValueError(f"the body has more than {MAX_OBJECTS:,} messages, parts, calls and tools")
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"it has {len(value):,} fields; an object of a request has at most {MAX_FIELDS}")
        return {key: each for key, each in value.items() if each is not None and key not in cls.harmless}


class TextPart(Body):
    """A part of a message."""

    harmless = frozenset({"cache_control"})
    type: Literal["text"]
    text: str
    citations: Empty = Field(default_factory=list)


as_parts = BeforeValidator(lambda content: [{"type": "text", "text": content}] if isinstance(content, str) else content)
Parts = Annotated[Items[TextPart], as_parts]


class ChatBody(Body):
    """A request for a turn."""

    model: str
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Return the request. Raises RefusedError that names the first field that is wrong."""
        try:
            return cls.model_validate(parse_json(body), context=count())
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
        place, value = ".".join(map(str, first["loc"]))[:200] or "the body", first["input"]
        if first["type"] == "extra_forbidden":
            raise RefusedError(400, "unsupported_parameter", f"{place} is not supported; leave it out")
        value = value[:100] if isinstance(value, str) else value
        problem = first["msg"].removeprefix("Value error, ")
        shown = ascii(value)[:100] if isinstance(value, str | int | float) else f"({type(value).__name__})"
        raise invalid(f"{place} is missing" if first["type"] == "missing" else f"{place}={shown}: {problem}")

    def _request(self, conversation: "Conversation", tools: Sequence[Mapping[str, Any]], **asked: Any) -> ChatRequest:
        """Return a request with the messages and tools, and the sampling that the body asks for."""
        for name, times in Counter(tool["function"]["name"] for tool in tools).items():
            if times > 1:
                raise invalid(f"tools: {times} tools have the name {name!r}; each needs its own")
        asked |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return ChatRequest(tuple(conversation.messages()), tuple(tools), **asked)


def invalid(message: str) -> RefusedError:
    """Return the error for a value that is wrong."""
    return RefusedError(400, "invalid_value", message)


def parse_json(text: str | bytes, what: str = "the body") -> Any:
    """Return a value of JSON without NaN, infinity, halves of characters, and more than 200 levels."""
    text = text.encode() if isinstance(text, str) else text
    try:
        value = from_json(text, allow_inf_nan=False)
        if _MAYBE_INFINITE.search(text):
            json_text(value)  # refuses the infinity that 1e999 is read as
    except ValueError as error:
        raise RefusedError(400, "invalid_json", f"{what} is not JSON: {error}") from None
    return value


def json_text(value: Any) -> str:
    """Return JSON in ASCII."""
    return _JSON.encode(value)


def text_of(parts: Iterable[TextPart]) -> str:
    """Return the text of parts, a line each."""
    return "\n".join(part.text for part in parts)


def tool_schema(name: str, description: str, parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a tool as chat templates take it."""
    parameters = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def error_type(error: RefusedError) -> str:
    """Return the kind of an error, in the words of both protocols."""
    return _ERRORS.get(error.status, "invalid_request" if error.status < 500 else "api") + "_error"


class Conversation:
    """The messages of a request. Results of calls follow the turn that made them and get the order of the calls."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._waiting: dict[str, str] = {}
        self._results: dict[str, Message] = {}

    def say(self, role: str, content: str) -> None:
        """Add a message of the system or the user."""
        self.messages().append({"role": role, "content": content})

    def turn(self, content: str, reasoning: str, calls: Sequence[tuple[str, ToolCall]]) -> None:
        """Add a turn of the assistant; a call comes with its id."""
        self.messages().append(AssistantTurn(content, reasoning, tuple(call for _, call in calls)).message())
        self._waiting, self._results = {call_id: call.name for call_id, call in calls}, {}
        if len(self._waiting) < len(calls):
            raise invalid("messages: two calls of one message have the same id")

    def result(self, call_id: str, content: str, name: str | None = None) -> None:
        """Add the result of a call of the last turn; a name must be that of its tool."""
        tool = self._waiting.get(call_id)
        if tool is None or call_id in self._results:
            raise invalid(f"messages: the result for {call_id!r} does not follow a call with this id, or is the second")
        if name and name != tool:
            raise invalid(f"messages: the result for {call_id!r} has the name {name!r}; the tool was {tool!r}")
        self._results[call_id] = {"role": "tool", "content": content, "name": tool}
        if len(self._results) == len(self._waiting):
            self._messages += [self._results[each] for each in self._waiting]
            self._waiting = {}

    def messages(self) -> list[Message]:
        """Return the messages. Raises RefusedError if a call has no result."""
        for call_id in self._waiting:
            if call_id not in self._results:
                raise invalid(f"messages: the call {call_id!r} has no result; it must follow the message of the call")
        return self._messages
