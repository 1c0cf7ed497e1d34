"""A request for a turn and its reply, without the words of a protocol: what OpenAI's and Anthropic's APIs have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.episodes.messages import AssistantTurn, Message


@dataclass(frozen=True)
class ChatRequest:
    """The messages of a conversation as a chat template takes them, and what the client asks of the next turn.

    A message has a `role` and a text `content`; an assistant's may have `reasoning_content` and `tool_calls`, whose
    arguments are objects; a tool's has the `name` of the tool. If the last message is the assistant's, the turn
    continues it. `tools`: JSON schemas. `may_call=False`: calls in the turn stay text. None: as the run samples.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    may_call: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class ChatReply:
    """A turn of the model. `tokens`: the text and the log-prob of each sampled token.

    A turn that is `cut` reached a limit of tokens. `stopped_at` is the stop string that ended it; the text of `said`
    does not have it.
    """

    turn_id: str
    said: AssistantTurn
    cut: bool
    stopped_at: str | None
    num_prompt_tokens: int
    tokens: tuple[tuple[str, float], ...]


class RefusedError(Exception):
    """A request that gets an error of its protocol; `status` is that of HTTP, `code` a word for programs."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code
