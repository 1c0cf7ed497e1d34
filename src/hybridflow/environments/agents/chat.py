"""A request for a turn and its reply, without the words of a protocol: what the APIs of OpenAI and Anthropic share."""

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
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
    """A turn of the model, and its tokens as they were sampled, with the one that ended it.

    `said` has no stop string, and nothing of a message that the request began. A turn that is `cut` reached a limit of
    tokens. `stopped_at`: the stop string of the request that ended it. `prompt_ids`: the tokens before the turn.
    """

    turn_id: str
    said: AssistantTurn
    cut: bool
    stopped_at: str | None
    prompt_ids: Sequence[int]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text_of: Callable[[int], str]

    @property
    def digest(self) -> str:
        """A digest of the sampled tokens."""
        return hashlib.blake2b(array("q", self.token_ids).tobytes(), digest_size=8).hexdigest()


class RefusedError(Exception):
    """A request that gets an error of its protocol; `status` is that of HTTP, `code` a word for programs."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code
