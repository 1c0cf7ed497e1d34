"""Conversations of data with tools as episodes that were played: rows of tokens in which the assistant's turns count.

Each turn is given to the renderer as if the model had sampled the template's text of it, so prompts, masks and new rows
are those of an episode.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hybridflow.data.chat_prompts import PROBE, Message, Schema
from hybridflow.data.tool_messages import uses_tools
from hybridflow.data.turn_rendering import TurnRenderer
from hybridflow.data.turns import AnswerTokens, TurnEncoder
from hybridflow.environments.episodes.rendering import UNKNOWN_FORMAT, ChatRenderer
from hybridflow.errors import DataConfigError, DataError, EnvironmentConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_RENDERERS = 64
"""Renderers that are kept, one for each list of tools."""


class EpisodeEncoder(TurnEncoder):
    """An encoder also of conversations with tools, calls and results of tools.

    Raises DataError for a tool or a result of one that the chat template does not write, and DataConfigError if its
    format of calls is not known.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_ids: Sequence[int] | None = None) -> None:
        super().__init__(tokenizer, stop_ids)
        self._writes_results = False

        @lru_cache(MAX_RENDERERS)
        def chat_renderer_of(tools: str) -> ChatRenderer:
            return ChatRenderer(tokenizer, json.loads(tools))

        self._chat_renderer_of = chat_renderer_of

    def _renderer_of(self, messages: Sequence[Message], tools: Sequence[Schema]) -> TurnRenderer:
        if not uses_tools(messages, tools):
            return self._renderer
        try:
            renderer = self._chat_renderer_of(json.dumps(tools))
        except EnvironmentConfigError as error:
            raise DataConfigError(str(error)) from error
        if renderer.format is None and any("tool_calls" in message for message in messages):
            raise DataConfigError(UNKNOWN_FORMAT)
        self._require_results(renderer, messages)
        first = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
        prompt, _ = renderer.render(messages[:first], "answer")
        for name in (tool["function"]["name"] for tool in tools):
            if name not in prompt:
                raise DataError(f"the chat template does not write the tool {name!r}; use a model whose template does.")
        return renderer

    def _require_results(self, renderer: ChatRenderer, messages: Sequence[Message]) -> None:
        """Raise DataError unless the chat template writes results of tools."""
        first = next((number for number, message in enumerate(messages) if message["role"] == "tool"), None)
        if first is None or self._writes_results:
            return
        text, _ = renderer.render([*messages[:first], {**messages[first], "content": PROBE}], "answer")
        if PROBE not in text:
            raise DataError(
                f"the chat template does not write message {first}, of the role tool; use a model whose template does "
                "(`hybridflow check-template`)."
            )
        self._writes_results = True

    def _losses(self, renderer: TurnRenderer, message: Message, reply: AnswerTokens) -> list[str]:
        """Return the parts of a message that its turn has lost, with calls that are read back as other ones."""
        lost = super()._losses(renderer, message, reply)
        wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        if wanted and isinstance(renderer, ChatRenderer) and renderer.format:
            read = renderer.format.parse(renderer.decode(reply.ids[:-1])).calls
            as_texts = any(call.is_text for call in read)
            found = [(call.name, _comparable(call.arguments, as_texts)) for call in read]
            if found != [(name, _comparable(arguments, as_texts)) for name, arguments in wanted]:
                lost.append(f"tool_calls={wanted!r:.200}")
        return lost


def _comparable(arguments: Mapping[str, Any], as_texts: bool) -> dict[str, Any]:
    if not as_texts:
        return dict(arguments)
    return {
        key.strip(): (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).strip("\n")
        for key, value in arguments.items()
    }
