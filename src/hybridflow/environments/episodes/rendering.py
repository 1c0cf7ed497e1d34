"""Conversations with tools as tokens, in which texts of users and tools stay texts; and what a sampled turn says."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hybridflow.data.chat_prompts import Ending
from hybridflow.data.chat_templates import NAMES
from hybridflow.data.turn_rendering import NextPrompt as NextPrompt
from hybridflow.data.turn_rendering import TurnRenderer
from hybridflow.environments.episodes.formats import ToolFormat, format_of, is_open, parse_plain
from hybridflow.environments.episodes.messages import AssistantTurn, Message, ToolCall
from hybridflow.environments.episodes.tools import Tool
from hybridflow.errors import DataError, EnvironmentConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN_FORMAT = (
    "the chat template writes calls of tools in a format that is not known; expected that of Hermes and Qwen "
    "(<tool_call> with JSON), Llama 3, GLM or DeepSeek. Set model.chat_template to one with tools: chatml-tools for "
    "models of <|im_start|>, llama3-tools for those of <|start_header_id|>, or a .jinja file; or leave tools out."
)

_PLACE = "\ue000{}\ue001"
_PLACES = re.compile("\ue000([0-9]+)\ue001")
"""Stands for a content while a template renders it; private characters, which no text of a template has."""

_THOUGHTS = {"<think>", "</think>"}
"""Control tokens that a model may write in the text of its turn."""


class ChatRenderer(TurnRenderer):
    """Renders the conversations of a tokenizer's chat template with some tools.

    A tool may be given as its JSON schema. Raises EnvironmentConfigError for a tokenizer without a chat template, and
    with tools for a template whose calls are in a format that is not known.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Tool | Mapping[str, Any]] = ()) -> None:
        if not tokenizer.chat_template:
            raise EnvironmentConfigError(
                "the tokenizer has no chat template, which separates the turns of an episode; set model.chat_template "
                f"to {', '.join(NAMES)} or a .jinja file."
            )
        super().__init__(tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        control = special | {token.content for token in added if len(token.content.strip()) > 1}  # no runs of spaces
        self._control = sorted(control, key=len, reverse=True)
        self._marks, self._marks_of_turns = _any_of(control), _any_of(special - _THOUGHTS)
        self._tool_contents: list[str] = []
        schemas = [tool.schema() if isinstance(tool, Tool) else dict(tool) for tool in tools]
        self._tools = _hidden(schemas, self._marks, self._tool_contents)
        template = tokenizer.get_chat_template(tools=self._tools or None)
        self.format: ToolFormat | None = format_of(template)
        if tools and self.format is None:
            raise EnvironmentConfigError(UNKNOWN_FORMAT)

    def parse(
        self, ids: Sequence[int], stop_ids: Sequence[int], prompt: str | None = None, begun: str = ""
    ) -> AssistantTurn:
        """Return what sampled tokens say; the last one may be a stop token.

        `prompt`: the text before them, which may have opened reasoning; None: that of any conversation. `begun`: what
        the turn says in it already.
        """
        opened = self._marks_of_turns.split(self._any_prompt if prompt is None else prompt)[-1]
        if begun := begun.strip():
            opened, found, spaces = opened.rpartition(begun)
            begun += spaces if found else ""
        text = begun + self.decode(ids[:-1] if ids and ids[-1] in stop_ids else ids)
        if not (self.format and self._tools):
            return parse_plain(text, is_reasoning=is_open(opened) or None)
        said = self.format.parse(text, is_reasoning=is_open(opened) or None)
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
            self.render([{"role": "user", "content": "a"}, turn], "end")
        except DataError:
            return False
        return True

    def render(self, messages: Sequence[Message], ending: Ending) -> tuple[str, list[str]]:
        """Return the text of a conversation, and the contents that stand in it as places.

        A content has a place if it holds the text of a control token, which a tokenizer would read as the token. In
        other fields and in the turns of the assistant, each text of a control token has a place of its own; added
        tokens that are not special, such as `<tool_call>`, are tokens in a turn, because a model writes them.
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
        return self.prompts.render(shown, ending, self._tools), contents

    def encode(self, text: str, contents: Sequence[str] = (), *, is_start: bool = False, after: str = "") -> list[int]:
        """Return the tokens of a rendered text, with the contents in their places as text and nothing else."""
        ids: list[int] = []
        for number, part in enumerate(_PLACES.split(text)):
            if number % 2:
                for piece in _without_marks(contents[int(part)], self._control):
                    ids += super().encode(piece)
            else:
                ids += super().encode(part, after=after)
                after = ""
        return ids


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
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
