"""Conversations as tokens, turn by turn: what was sampled stays, and only new messages are rendered.

    messages ──> start() ──> prompt ids ──> engine ──> sampled ids (kept as they are)
                                               ^             │ the format parses their text
              go_on(): ids of new messages ────┘<── tools, environment

If a template changes what came before, the episode goes on in a new row, whose prompt is the whole conversation.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from hybridflow.data.chat_prompts import RENDERING_LIMIT_S
from hybridflow.environments.episodes.formats import ToolFormat, format_of, is_open, parse_plain
from hybridflow.environments.episodes.messages import AssistantTurn, Message, ToolCall
from hybridflow.environments.episodes.tools import Tool
from hybridflow.errors import DataError, EnvironmentConfigError
from hybridflow.runtime.deadline import DeadlineExceeded, call_within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN_FORMAT = (
    "the chat template writes calls of tools in a format that is not known; expected that of Hermes and Qwen "
    "(<tool_call> with JSON), Llama 3, GLM or DeepSeek. Use a model with such a template, or messages without tools."
)

_PLACE = "\ue000{}\ue001"
_PLACES = re.compile("\ue000([0-9]+)\ue001")
"""Stands for a content while a template renders it; private characters, which no text of a template has."""

_THOUGHTS = {"<think>", "</think>"}
"""Control tokens that a model may write in the text of its turn."""


@dataclass(frozen=True)
class NextPrompt:
    """The tokens after a turn. `is_new_row`: they are the whole conversation, for a reason, and begin a new row."""

    ids: list[int]
    text: str
    is_new_row: bool = False
    reason: str = ""


class ChatRenderer:
    """Renders the conversations of a tokenizer's chat template with some tools.

    A tool may be given as its JSON schema. Raises EnvironmentConfigError for a tokenizer without a chat template, and
    with tools for a template whose calls are in a format that is not known.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Tool | Mapping[str, Any]] = ()) -> None:
        if not tokenizer.chat_template:
            raise EnvironmentConfigError("the tokenizer has no chat template, which separates the turns of an episode.")
        self._tokenizer = tokenizer
        self._control = sorted(_control_texts(tokenizer), key=len, reverse=True)
        self._marks = _any_of(self._control)
        self._marks_of_turns = _any_of([text for text in _special_texts(tokenizer) if text not in _THOUGHTS])
        self._tool_contents: list[str] = []
        schemas = [tool.schema() if isinstance(tool, Tool) else dict(tool) for tool in tools]
        self._tools = _hidden(schemas, self._marks, self._tool_contents)
        template = tokenizer.get_chat_template(tools=self._tools or None)
        self.format: ToolFormat | None = format_of(template)
        if tools and self.format is None:
            raise EnvironmentConfigError(UNKNOWN_FORMAT)

    def start(self, messages: Sequence[Message]) -> NextPrompt:
        """Return the prompt of a conversation's first turn."""
        text, contents = self.render(messages, add_generation_prompt=True)
        return NextPrompt(self.encode(text, contents), text)

    def parse(self, ids: Sequence[int], stop_ids: Sequence[int], prompt: str | None = None) -> AssistantTurn:
        """Return what sampled tokens say; the last one may be a stop token.

        `prompt`: the text before them, which may have opened reasoning; None: that of any conversation.
        """
        kept = list(ids[:-1] if ids and ids[-1] in stop_ids else ids)
        text = self.decode(kept)
        begun = self._marks_of_turns.split(self._any_prompt if prompt is None else prompt)[-1]
        if not (self.format and self._tools):
            return parse_plain(text, is_reasoning=is_open(begun) or None)
        said = self.format.parse(text, is_reasoning=is_open(begun))
        if len(said.calls) > 1 and not self._takes_several_calls:
            ignored = "one call at a time: the calls after the first one were not made"
            said = replace(said, calls=said.calls[:1], malformed=(*said.malformed, ignored))
        return said

    @cached_property
    def _any_prompt(self) -> str:
        return self.start([{"role": "user", "content": "a"}]).text

    @cached_property
    def _takes_several_calls(self) -> bool:
        """Whether the template writes a turn with two calls, which that of Llama 3 does not."""
        turn = AssistantTurn("", calls=(ToolCall("a"), ToolCall("b"))).message()
        try:
            self.render([{"role": "user", "content": "a"}, turn], add_generation_prompt=False)
        except DataError:
            return False
        return True

    def go_on(
        self,
        before: NextPrompt,
        sampled: Sequence[int],
        messages: Sequence[Message],
        new: Sequence[Message],
        *,
        ends_with_token: bool = True,
    ) -> NextPrompt:
        """Return the tokens between a sampled turn and the next one.

        `before`: the prompt of the turn. `sampled`: its tokens, the last of which ended it, or a stop string did
        (not `ends_with_token`). `messages`: the conversation with the turn as its last message. `new`: the messages
        after it.

        The row goes on if the template writes the whole conversation with the sampled text in it, or if it writes the
        turn in one way, whether or not messages follow: then it may be written in another way than it was sampled.
        After a stop string it may not, since nothing marks the place where the turn ended.
        """
        text, contents = self.render([*messages, *new], add_generation_prompt=True)
        said = before.text + self.decode(sampled)
        if text.startswith(said):
            return NextPrompt(self.encode(text[len(said) :], contents), text)
        if not ends_with_token:
            return self._new_row(text, contents, _difference(said, text))
        after_turn, _ = self.render(messages, add_generation_prompt=False)
        for earlier, later in ((before.text, after_turn), (after_turn, text)):
            if not later.startswith(earlier):
                return self._new_row(text, contents, _difference(earlier, later))
        end, following = self.decode(sampled[-1:]), text[len(after_turn) :]
        _, found, rest = after_turn[len(before.text) :].rpartition(end)
        if not found and following.startswith(end):  # the first token of the next message ended the turn, as in GLM
            return NextPrompt(self.encode(following[len(end) :], contents), text)
        if not found:
            return self._new_row(text, contents, f"the template does not write {end!r}, which ended the turn")
        return NextPrompt(self.encode(rest + following, contents), text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included."""
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _new_row(self, text: str, contents: Sequence[str], reason: str) -> NextPrompt:
        return NextPrompt(self.encode(text, contents), text, is_new_row=True, reason=reason)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> tuple[str, list[str]]:
        """Return the text of a conversation, and the contents that stand in it as places.

        A content has a place if it holds the text of a control token, which a tokenizer would read as the token. In
        other fields and in the turns of the assistant, each text of a control token has a place of its own; added
        tokens that are not special, such as <tool_call>, are tokens in a turn, because a model writes them.
        """
        shown, contents = [], list(self._tool_contents)
        for message in messages:
            fields, content = {**message}, message.get("content")
            marks = self._marks_of_turns if message["role"] == "assistant" else self._marks
            if marks is self._marks and isinstance(content, str) and marks.search(content):
                del fields["content"]
                fields = {**message, **_hidden(fields, marks, contents), "content": _PLACE.format(len(contents))}
                contents.append(content)
            else:
                fields = _hidden(fields, marks, contents)
            shown.append({**fields, "role": message["role"]})
        return self._apply(shown, add_generation_prompt), contents

    def stop_after(self, messages: Sequence[Message], new: Sequence[Message], stop_ids: Sequence[int]) -> int | None:
        """Return the stop token with which the text after a turn begins, where a template ends no turn by itself.

        `messages`: the conversation with the turn as its last message. `new`: the messages after it.
        """
        written, _ = self.render(messages, add_generation_prompt=False)
        text, _ = self.render([*messages, *new], add_generation_prompt=True)
        after = text[len(written) :] if text.startswith(written) else ""
        return next((each for each in stop_ids if after.startswith(self.decode([each]))), None)

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

    def encode(self, text: str, contents: Sequence[str] = ()) -> list[int]:
        """Return the tokens of a rendered text, with the contents in their places as text and nothing else."""
        ids: list[int] = []
        for number, part in enumerate(_PLACES.split(text)):
            if number % 2:
                for piece in _without_marks(contents[int(part)], self._control):
                    ids += self._ids_of(piece)
            else:
                ids += self._ids_of(part)
        return ids

    def _ids_of(self, text: str) -> list[int]:
        try:
            return cast(list[int], self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
        except TypeError as error:  # half of a character
            raise DataError(f"the tokenizer cannot encode {text!r:.200}: {error}.") from error


def _special_texts(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}


def _control_texts(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Return the texts of tokens that may control a conversation: special ones, and added ones but runs of spaces."""
    added = tokenizer.added_tokens_decoder.values()
    return {token.content for token in added if token.special or len(token.content.strip()) > 1}


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of these texts, longest first, and of the characters around the number of a place."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(["[\ue000\ue001]", *map(re.escape, longest_first)]))


def _hidden(value: Any, marks: re.Pattern[str], contents: list[str]) -> Any:
    """Return a value of JSON with a place for each mark in its texts and keys; `contents` gets the marks."""

    def place(mark: re.Match[str]) -> str:
        contents.append(mark[0])
        return _PLACE.format(len(contents) - 1)

    if isinstance(value, str):
        return marks.sub(place, value)
    if isinstance(value, Mapping):
        return {_hidden(key, marks, contents): _hidden(each, marks, contents) for key, each in value.items()}
    return [_hidden(each, marks, contents) for each in value] if isinstance(value, list | tuple) else value


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
