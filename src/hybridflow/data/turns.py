"""What is learned from a conversation: each answer up to the stop token that ends it, after what a model sees before.

One rule for supervised examples, pairs of responses and episodes of data:

- The text is the chat template's. An answer begins where the prompt ends that asks for it, and ends with its first stop
  token. Nothing after that token is learned; text there is an error.
- If the template writes no stop token, the tokenizer's EOS ends the answer, in a row of its own: no prompt has it.
- A response that the template does not write, such as one whose reasoning it drops, follows the prompt as it is.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.data.chat_prompts import PROBE, Message, Schema, is_begun, named
from hybridflow.data.tokenizer import eos_token_id, stop_token_ids
from hybridflow.data.tool_messages import uses_tools
from hybridflow.data.turn_rendering import NextPrompt, TurnRenderer
from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime.observe import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

_OPENED = re.compile(r"(<[^<>]+>)\s*$")
"""A mark that a generation prompt ends with, such as `<think>`, and that some templates drop from later prompts."""


@dataclass(frozen=True)
class Turns:
    """Token ids of a conversation that ends with an answer; `counts` is True where `response` is the assistant's."""

    prompt: list[int]
    response: list[int]
    counts: list[bool]


@dataclass(frozen=True)
class AnswerTokens:
    """The tokens of an answer, with the stop token at its end, and its text where the template has written it."""

    ids: list[int]
    text: str = ""


class TurnEncoder:
    """Encodes conversations as rows to train on.

    `stop_ids` end an answer, by default the tokenizer's EOS; so does the token that the template writes after it.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", stop_ids: Sequence[int] | None = None, chat_template: bool = True
    ) -> None:
        self._renderer = TurnRenderer(tokenizer, chat_template)
        self.prompts = self._renderer.prompts
        own = self.prompts.end_of_turn()
        given = stop_token_ids(tokenizer) if stop_ids is None else stop_ids
        self.stop_ids = tuple(sorted({*given, own} - {None}))
        self._end = eos_token_id(tokenizer) if own is None else own
        self._marks = [self._renderer.decode([stop_id]) for stop_id in self.stop_ids]
        self._warned: set[str] = set()

    def __call__(self, messages: Sequence[Message], tools: Sequence[Schema], place: str) -> list[Turns]:
        """Return the rows of a conversation, in order; each answer whose weight is not 0 counts in one of them.

        A row begins with the first of these answers, and where the template changes earlier turns. Messages after the
        last one are left out. Raises DataError, naming `place`, for a conversation without such an answer or with none
        before it, and for one that the chat template does not write.
        """
        with named(place):
            answers = _answers_of(messages)
            checked = self.checked(messages)
            renderer = self._renderer_of(checked, tools)
            if len(answers) > 1 and not renderer.prompts.uses_template:
                raise DataError(
                    f"{len(answers)} messages of the assistant need a chat template, which marks the ends of turns; "
                    "add one to the tokenizer (and set data.chat_template = true), or write one row for each answer."
                )
            return list(self._rows(renderer, checked, answers, place))

    def responses(
        self, prompt: Sequence[Message], texts: Sequence[str], place: str
    ) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of a prompt, and those of each response to it. Raises DataError, naming `place`."""
        with named(place):
            before = self.checked(prompt)
            start = self._renderer.start(before)
            return start.ids, [self._response(before, start, text) for text in texts]

    def _response(self, prompt: list[Message], start: NextPrompt, text: str) -> list[int]:
        """Return the tokens of a response, with its stop token."""
        said = self.said(text)
        if self.prompts.uses_template:
            with suppress(DataError):  # a template may refuse to end with an answer
                reply = self._reply(self._renderer, start, answered(prompt, said), [])
                if not reply.text or _has(reply.text, said):
                    return reply.ids
        return self._plain(text, start.text)

    def _plain(self, text: str, after: str) -> list[int]:
        ids = self._renderer.encode(text, after=after if self.prompts.uses_template else "")
        end = self._end_of(ids, "the response")
        return [*ids, self._end] if end is None else ids[: end + 1]

    def _renderer_of(self, messages: Sequence[Message], tools: Sequence[Schema]) -> TurnRenderer:
        if uses_tools(messages, tools):
            raise DataConfigError(
                "the conversation has tools, calls or results of tools, which need a chat template; use a tokenizer "
                "with one and data.chat_template = true (in Python also SFTDataset(encode_episode=...))."
            )
        return self._renderer

    def _rows(self, renderer: TurnRenderer, messages: list[Message], answers: list[int], place: str) -> Iterator[Turns]:
        prompt = renderer.start(messages[: answers[0]], may_continue=False)
        row = Turns(prompt.ids, [], [])
        for number, following in zip(answers, [*answers[1:], len(messages)], strict=True):
            history, new = messages[: number + 1], messages[number + 1 : following]
            reply = self._reply(renderer, prompt, history, new)
            if reply.text and (lost := self._losses(renderer, history[-1], reply)):
                found = "%s: message %s: the chat template writes this turn as %r, without %s, which is not learned"
                text = renderer.decode(reply.ids[:-1])
                self._warn("losses", found, place, str(number), text[:300], " and ".join(lost))
            row.response.extend(reply.ids)
            row.counts.extend([True] * len(reply.ids))
            if number == answers[-1]:
                break
            prompt = renderer.go_on(prompt, reply.ids, history, new, may_continue=False, written=reply.text)
            if prompt.is_new_row:
                yield row
                row = Turns(prompt.ids, [], [])
            else:
                row.response.extend(prompt.ids)
                row.counts.extend([False] * len(prompt.ids))
        yield row

    def _reply(
        self, renderer: TurnRenderer, prompt: NextPrompt, history: list[Message], new: list[Message]
    ) -> AnswerTokens:
        """Return the last message of `history` as an answer to its prompt; `new`: the messages after it."""
        if not renderer.prompts.uses_template:
            return AnswerTokens(self._plain(history[-1]["content"], prompt.text))
        whole, contents = renderer.render(history, "end")
        if not whole.startswith(prompt.text):
            opened, said = _OPENED.search(prompt.text), history[-1]["content"].lstrip()
            if opened and said.startswith(opened[1]):
                return AnswerTokens(self._plain(said.removeprefix(opened[1]).lstrip("\n"), prompt.text))
            raise DataError(
                f"the chat template writes the prompt of message {len(history) - 1} in another way once it is answered,"
                " so a model does not see this text when it answers (`hybridflow check-template` shows more)."
            )
        text = whole[len(prompt.text) :]
        ids = renderer.encode(text, contents, after=prompt.text)
        end = self._end_of(ids, f"message {len(history) - 1}")
        if end is None:
            stop = renderer.stop_after(history, new or [_answer_of(history[-1])], self.stop_ids)
            ids.append(self._end if stop is None else stop)
            if stop is None:
                mark = renderer.decode(ids[-1:])
                self._warn("stop", "the chat template writes no stop token after %r; %r is added", text[-20:], mark)
            return AnswerTokens(ids, text + renderer.decode(ids[-1:]))
        mark = renderer.decode(ids[end : end + 1])
        before, found, _ = text.partition(mark)
        return AnswerTokens(ids[: end + 1], before + found)

    def _end_of(self, ids: Sequence[int], what: str) -> int | None:
        """Return the place of the first stop token; raise DataError if a text follows."""
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), None)
        if end is not None and (rest := self._renderer.decode(ids[end + 1 :], with_control=False).strip()):
            raise DataError(
                f"{what} has the stop token {self._renderer.decode(ids[end : end + 1])!r} before {rest[:40]!r}, where "
                "generation would end; remove it."
            )
        return end

    def said(self, text: str, what: str = "the answer") -> str:
        """Return the text of an answer up to its stop token, and without that if the chat template writes it."""
        ids = self._renderer.encode(text) if any(mark in text for mark in self._marks) else []
        end = self._end_of(ids, what)
        if end is None:
            return text
        before, mark, _ = text.partition(self._renderer.decode(ids[end : end + 1]))
        return before if self.prompts.uses_template else before + mark

    def checked(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as a chat template reads them; raise DataError for what has no meaning."""
        checked = [dict(message) for message in self.prompts.checked(messages)]
        for number, message in enumerate(checked):
            if message["role"] == "assistant" and message.get("content"):
                message["content"] = self.said(message["content"], f"message {number}")
            if not message.get("reasoning_content", True):
                del message["reasoning_content"]
        return checked

    def _losses(self, renderer: TurnRenderer, message: Message, reply: AnswerTokens) -> list[str]:
        """Return the parts of a message that its turn has lost."""
        parts = [(key, message.get(key, "")) for key in ("content", "reasoning_content")]
        lost = [(key, value) for key, value in parts if not _has(reply.text, value)]
        return [f"{key}={value!r:.100}" for key, value in lost if not _has(renderer.decode(reply.ids), value)]

    def _warn(self, kind: str, text: str, *values: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(f"{text}; later ones are not logged.", *values)


def answered(prompt: Sequence[Message], response: str) -> list[Message]:
    """Return a prompt with the response to it, which goes on with the last message if that is the assistant's."""
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in prompt]
    begun = messages.pop() if is_begun(messages) else {"role": "assistant", "content": ""}
    return [*messages, {**begun, "content": begun["content"] + response}]


def _answers_of(messages: Sequence[Message]) -> list[int]:
    """Return the numbers of the answers to learn; raise DataError if there is none after another message."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    counted = [number for number in answers if messages[number].get("weight", 1) != 0]
    if not counted or counted[0] == 0:
        roles = ", ".join(message["role"] for message in messages)
        weights = " with weight 0" if answers and not counted else ""
        raise DataError(
            f"the conversation has the roles {roles}{weights}; expected a message of the assistant with another "
            "message before it."
        )
    return counted


def _answer_of(message: Message) -> Message:
    """Return a message that may follow a turn of the assistant."""
    return {"role": "tool" if "tool_calls" in message else "user", "content": PROBE}


def _has(text: str, part: str) -> bool:
    """Return whether a text has a part, whatever the spaces in both."""
    return "".join(part.split()) in "".join(text.split())
