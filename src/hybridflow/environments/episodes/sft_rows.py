"""Conversations of data as episodes that were played: rows of tokens in which the assistant's turns are trained.

Each turn is given to the renderer as if the model had sampled the template's text of it, so prompts, masks and new rows
are those of an episode.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hybridflow.data.turns import Turns, answers_of
from hybridflow.environments.episodes.messages import Message
from hybridflow.environments.episodes.rendering import UNKNOWN_FORMAT, ChatRenderer, NextPrompt
from hybridflow.errors import DataConfigError, DataError, EnvironmentConfigError
from hybridflow.runtime.observe import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

PROBE = "HybridFlowProbe"
"""A result of a tool that no conversation contains, to see whether a chat template writes it."""

MAX_RENDERERS = 64
"""Renderers that are kept, one for each list of tools."""


class EpisodeEncoder:
    """Encodes a conversation, with or without tools, as rows to train on.

    The tokens that count are those of the assistant's turns, up to the stop token that ends each; the first one follows
    the template's generation prompt. Messages after the last turn are left out. Where the template changes earlier
    turns, a new row begins, so that each turn counts once.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_ids: Sequence[int]) -> None:
        self._stop_ids, self._writes_results, self._has_warned = stop_ids, False, False

        @lru_cache(MAX_RENDERERS)
        def renderer_of(tools: str) -> ChatRenderer:
            return ChatRenderer(tokenizer, json.loads(tools))

        self._renderer_of = renderer_of

    def __call__(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], place: str) -> list[Turns]:
        """Return the rows of a conversation, in order.

        Raises DataError, naming `place`, for a conversation without a turn of the assistant, and for a turn, a tool or
        a result of one that the chat template does not write; DataConfigError if its format of calls is not known.
        """
        answers = answers_of(messages, place)
        try:
            renderer = self._renderer_of(json.dumps(tools))
            return self._rows(renderer, [_without_empty(message) for message in messages], tools, answers, place)
        except EnvironmentConfigError as error:
            raise DataConfigError(f"{place}: {error}") from error
        except DataError as error:
            raise type(error)(f"{place}: {error}") from error

    def _rows(
        self,
        renderer: ChatRenderer,
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]],
        answers: list[int],
        place: str,
    ) -> list[Turns]:
        if renderer.format is None and any("tool_calls" in message for message in messages):
            raise DataConfigError(UNKNOWN_FORMAT)
        self._require_results(renderer, messages)
        prompt = renderer.start(messages[: answers[0]])
        for name in (tool["function"]["name"] for tool in tools):
            if name not in prompt.text:
                raise DataError(f"the chat template does not write the tool {name!r}; use a model whose template does.")
        rows = [Turns(prompt.ids, [], [])]
        for number, following in zip(answers, [*answers[1:], len(messages)], strict=True):
            history, new = messages[: number + 1], messages[number + 1 : following]
            turn = self._turn(renderer, prompt, history, new)
            self._warn_of_losses(renderer, history[-1], turn, f"{place}: message {number}")
            rows[-1].response.extend(turn)
            rows[-1].counts.extend([True] * len(turn))
            if number == answers[-1]:
                break
            prompt = renderer.go_on(prompt, turn, history, new)
            if prompt.is_new_row:
                rows.append(Turns(prompt.ids, [], []))
            else:
                rows[-1].response.extend(prompt.ids)
                rows[-1].counts.extend([False] * len(prompt.ids))
        return rows

    def _turn(
        self, renderer: ChatRenderer, prompt: NextPrompt, history: list[Message], new: list[Message]
    ) -> list[int]:
        """Return the tokens of the last message of `history`, with the stop token that ends them."""
        written, contents = renderer.render(history, add_generation_prompt=False)
        number = len(history) - 1
        if not written.startswith(prompt.text):
            raise DataError(
                f"the chat template writes the prompt of message {number} in another way once it is answered, so a "
                "model does not see this text when it answers (`hybridflow check-template` shows more)."
            )
        ids = renderer.encode(written[len(prompt.text) :], contents)
        end = next((place for place, token in enumerate(ids) if token in self._stop_ids), None)
        if end is None:
            stop = renderer.stop_after(history, new or [_answer_of(history[-1])], self._stop_ids)
            if stop is None:
                marks = ", ".join(repr(renderer.decode([stop_id])) for stop_id in self._stop_ids)
                raise DataError(
                    f"the chat template ends message {number} with {renderer.decode(ids)[-20:]!r}, but generation "
                    f"stops at {marks}; set eos_token_id in generation_config.json to the token that ends a turn."
                )
            return [*ids, stop]
        if rest := renderer.decode(ids[end + 1 :]).strip():
            raise DataError(
                f"message {number} has the stop token {renderer.decode(ids[end : end + 1])!r} before {rest[:40]!r}, "
                "where generation would end; remove it from the message."
            )
        return ids[: end + 1]

    def _require_results(self, renderer: ChatRenderer, messages: Sequence[Message]) -> None:
        """Raise DataError unless the chat template writes results of tools."""
        first = next((number for number, message in enumerate(messages) if message["role"] == "tool"), None)
        if first is None or self._writes_results:
            return
        text, _ = renderer.render(
            [*messages[:first], {**messages[first], "content": PROBE}], add_generation_prompt=True
        )
        if PROBE not in text:
            raise DataError(
                f"the chat template does not write message {first}, of the role tool; use a model whose template does "
                "(`hybridflow check-template`)."
            )
        self._writes_results = True

    def _warn_of_losses(self, renderer: ChatRenderer, message: Message, turn: Sequence[int], place: str) -> None:
        """Log, once, that a part of a turn is not trained, or that calls are read back as other ones."""
        if self._has_warned:
            return
        text = renderer.decode(turn[:-1])
        lost = [
            f"{key}={message[key]!r:.100}"
            for key in ("content", "reasoning_content")
            if message.get(key, "").strip() not in text
        ]
        wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        if wanted and renderer.format:
            read = renderer.format.parse(text).calls
            as_texts = any(call.is_text for call in read)
            found = [(call.name, _comparable(call.arguments, as_texts)) for call in read]
            if found != [(name, _comparable(arguments, as_texts)) for name, arguments in wanted]:
                lost.append(f"tool_calls={wanted!r:.200}")
        if lost:
            self._has_warned = True
            logger.warning(
                "%s: the chat template writes this turn as %r, without %s, which is not learned; later ones are not "
                "logged.",
                *(place, text[:300], " and ".join(lost)),
            )


def _without_empty(message: Message) -> Message:
    """Return a message as an episode has it: without reasoning where there is none."""
    return {key: value for key, value in message.items() if key != "reasoning_content" or value}


def _answer_of(message: Message) -> Message:
    """Return a message that may follow a turn of the assistant."""
    return {"role": "tool" if "tool_calls" in message else "user", "content": PROBE}


def _comparable(arguments: Mapping[str, Any], as_texts: bool) -> dict[str, Any]:
    if not as_texts:
        return dict(arguments)
    return {
        key.strip(): (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).strip("\n")
        for key, value in arguments.items()
    }
