"""Conversations as tokens, turn by turn: what was sampled stays, and only new messages are rendered.

    messages ──> start() ──> prompt ids ──> engine ──> sampled ids (kept as they are)
                                               ^             │ the format parses their text
              go_on(): ids of new messages ────┘<── tools, environment

If a template changes what came before, the episode goes on in a new row, whose prompt is the whole conversation.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from hybridflow.data.chat_prompts import RENDERING_LIMIT_S
from hybridflow.environments.formats import ToolFormat, format_of, parse_plain
from hybridflow.environments.messages import AssistantTurn, Message
from hybridflow.environments.tools import Tool
from hybridflow.errors import DataError, EnvironmentConfigError
from hybridflow.runtime.deadline import DeadlineExceeded, call_within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE = "\ue000{}\ue001"
_PLACES = re.compile("\ue000([0-9]+)\ue001")
"""Stands for a content while a template renders it; private characters, which no text of a template has."""


@dataclass(frozen=True)
class NextPrompt:
    """The tokens after a turn. `is_new_row`: they are the whole conversation, for a reason, and begin a new row."""

    ids: list[int]
    text: str
    is_new_row: bool = False
    reason: str = ""


class ChatRenderer:
    """Renders the conversations of a tokenizer's chat template with some tools, or their schemas.

    Raises EnvironmentConfigError for a tokenizer without a chat template, and with tools for a template whose calls are
    in a format that is not known.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Tool | Mapping[str, Any]] = ()) -> None:
        if not tokenizer.chat_template:
            raise EnvironmentConfigError("the tokenizer has no chat template, which separates the turns of an episode.")
        self._tokenizer = tokenizer
        self._tools = [tool.schema() if isinstance(tool, Tool) else dict(tool) for tool in tools]
        template = tokenizer.get_chat_template(tools=self._tools or None)
        self.format: ToolFormat | None = format_of(template)
        if tools and self.format is None:
            raise EnvironmentConfigError(
                "the chat template writes calls of tools in a format that is not known; expected that of Hermes and "
                "Qwen (<tool_call> with JSON), Llama 3, GLM or DeepSeek. Use a model with such a template, or an "
                "environment without tools."
            )
        self._control = sorted(_control_texts(tokenizer), key=len, reverse=True)

    def start(self, messages: Sequence[Message]) -> NextPrompt:
        """Return the prompt of a conversation's first turn."""
        text, contents = self.render(messages, add_generation_prompt=True)
        return NextPrompt(self._encode(text, contents), text)

    def parse(self, ids: Sequence[int], stop_ids: Sequence[int]) -> AssistantTurn:
        """Return what sampled tokens say; the last one may be a stop token."""
        kept = list(ids[:-1] if ids and ids[-1] in stop_ids else ids)
        text = self.decode(kept)
        return self.format.parse(text) if self.format and self._tools else parse_plain(text)

    def go_on(
        self, before: NextPrompt, sampled: Sequence[int], messages: Sequence[Message], new: Sequence[Message]
    ) -> NextPrompt:
        """Return the tokens between a sampled turn and the next one.

        `before`: the prompt of the turn. `sampled`: its tokens, the last of which ended it. `messages`: the
        conversation with the turn as its last message. `new`: the messages after it.

        The row goes on if the template writes the whole conversation with the sampled text in it, or if it writes the
        turn in one way, whether or not messages follow: then it may be written in another way than it was sampled.
        """
        text, contents = self.render([*messages, *new], add_generation_prompt=True)
        said = before.text + self.decode(sampled)
        if text.startswith(said):
            return NextPrompt(self._encode(text[len(said) :], contents), text)
        after_turn, _ = self.render(messages, add_generation_prompt=False)
        for earlier, later in ((before.text, after_turn), (after_turn, text)):
            if not later.startswith(earlier):
                return self._new_row(text, contents, _difference(earlier, later))
        end = self.decode(sampled[-1:])
        _, found, rest = after_turn[len(before.text) :].rpartition(end)
        if not found:
            return self._new_row(text, contents, f"the template does not write {end!r}, which ended the turn")
        return NextPrompt(self._encode(rest + text[len(after_turn) :], contents), text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included."""
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _new_row(self, text: str, contents: Sequence[str], reason: str) -> NextPrompt:
        return NextPrompt(self._encode(text, contents), text, is_new_row=True, reason=reason)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> tuple[str, list[str]]:
        """Return the text of a conversation, and the contents that stand in it as places.

        A content has a place if it holds the text of a control token, which a tokenizer would read as the token.
        """
        shown, contents = [], list[str]()
        for message in messages:
            content = message.get("content")
            if message["role"] != "assistant" and isinstance(content, str) and self._holds_control(content):
                message = {**message, "content": _PLACE.format(len(contents))}
                contents.append(content)
            shown.append(message)
        return self._apply(shown, add_generation_prompt), contents

    def _holds_control(self, content: str) -> bool:
        return bool(_PLACES.search(content)) or any(mark in content for mark in self._control)

    def _apply(self, messages: list[Message], add_generation_prompt: bool) -> str:
        tools = cast(Any, self._tools or None)

        def apply() -> Any:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )

        try:
            return str(call_within(RENDERING_LIMIT_S, apply))
        except DeadlineExceeded as error:
            raise DataError(f"the chat template took longer than {RENDERING_LIMIT_S} s for a conversation.") from error
        except Exception as error:  # a template is a program
            reason = str(error) or type(error).__name__
            raise DataError(f"the chat template rejects the messages of an episode: {reason[:500]}.") from error

    def _encode(self, text: str, contents: Sequence[str]) -> list[int]:
        """Return the tokens of a rendered text, with the contents in their places as text and nothing else."""
        ids: list[int] = []
        for number, part in enumerate(_PLACES.split(text)):
            if number % 2:
                for piece in _without_marks(contents[int(part)], self._control):
                    ids += self.encode(piece)
            else:
                ids += self.encode(part)
        return ids

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, control tokens included; nothing is added."""
        return cast(list[int], self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _control_texts(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Return the texts of tokens that may control a conversation: special ones, and added ones but runs of spaces."""
    added = tokenizer.added_tokens_decoder.values()
    return {token.content for token in added if token.special or len(token.content.strip()) > 1}


def _without_marks(text: str, marks: Sequence[str]) -> list[str]:
    """Cut a text inside each control text in it, so that no piece holds one."""
    pieces = [text]
    for mark in marks:
        if len(mark) > 1:
            cut = []
            for piece in pieces:
                first, *others = piece.split(mark)
                cut.append(first)
                for other in others:
                    cut[-1] += mark[:1]
                    cut.append(mark[1:] + other)
            pieces = cut
    return [piece for piece in pieces if piece]


def _difference(before: str, after: str) -> str:
    """Return where a text that should begin with another one differs from it."""
    same = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(map(len, (before, after)))
    )
    start = max(0, same - 20)
    return f"the template changes what came before: {before[start : same + 40]!r} became {after[start : same + 40]!r}"
