"""Conversations as tokens, turn by turn: a turn's tokens stay as they are, and only new messages are rendered.

    messages ──> start() ──> prompt ids ──> engine ──> sampled ids (kept as they are)
                                               ^             │ the format parses their text
              go_on(): ids of new messages ────┘<── tools, environment

If a template changes what came before, the conversation goes on in a new row, whose prompt is all of it.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from hybridflow.data.chat_prompts import Ending, Message, PromptEncoder, encode_texts, is_begun
from hybridflow.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class NextPrompt:
    """The tokens after a turn. `is_new_row`: they are the whole conversation, for a reason, and begin a new row."""

    ids: list[int]
    text: str
    is_new_row: bool = False
    reason: str = ""


class TurnRenderer:
    """Renders conversations turn by turn, by a tokenizer's chat template or as plain text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", chat_template: bool = True) -> None:
        self._tokenizer = tokenizer
        self.prompts = PromptEncoder(tokenizer, chat_template)

    def start(self, messages: Sequence[Message], *, may_continue: bool = True) -> NextPrompt:
        """Return the prompt of a conversation's first turn.

        If its last message is the assistant's, the turn continues that one, or with `may_continue=False` follows it.
        """
        text, contents = self.render(messages, _ending(messages, may_continue))
        return NextPrompt(self.encode(text, contents, is_start=True), text)

    def go_on(
        self,
        before: NextPrompt,
        sampled: Sequence[int],
        messages: Sequence[Message],
        new: Sequence[Message],
        *,
        ends_with_token: bool = True,
        may_continue: bool = True,
        written: str = "",
    ) -> NextPrompt:
        """Return the tokens between a sampled turn and the next one.

        `before`: the prompt of the turn. `sampled`: its tokens, the last of which ended it, or a stop string did
        (not `ends_with_token`). `messages`: the conversation with the turn as its last message. `new`: the messages
        after it. `written`: the turn's text where it is known, otherwise its tokens are decoded.

        The row goes on if the template writes the whole conversation with the sampled text in it, or if it writes the
        turn in one way, whether or not messages follow: then it may be written in another way than it was sampled.
        After a stop string it may not, since nothing marks the place where the turn ended.
        """
        text, contents = self.render([*messages, *new], _ending(new, may_continue))
        said, end = before.text + (written or self.decode(sampled)), self.decode(sampled[-1:])
        if text.startswith(said):
            return NextPrompt(self.encode(text[len(said) :], contents, after=end), text)
        if not ends_with_token:
            return self._new_row(text, contents, _difference(said, text))
        after_turn, _ = self.render(messages, "end")
        for earlier, later in ((before.text, after_turn), (after_turn, text)):
            if not later.startswith(earlier):
                return self._new_row(text, contents, _difference(earlier, later))
        following = text[len(after_turn) :]
        _, found, rest = after_turn[len(before.text) :].rpartition(end)
        if not found and following.startswith(end):  # the first token of the next message ended the turn, as in GLM
            return NextPrompt(self.encode(following[len(end) :], contents, after=end), text)
        if not found:
            return self._new_row(text, contents, f"the template does not write {end!r}, which ended the turn")
        return NextPrompt(self.encode(rest + following, contents, after=end), text)

    def _new_row(self, text: str, contents: Sequence[str], reason: str) -> NextPrompt:
        return NextPrompt(self.encode(text, contents, is_start=True), text, is_new_row=True, reason=reason)

    def stop_after(self, messages: Sequence[Message], new: Sequence[Message], stop_ids: Sequence[int]) -> int | None:
        """Return the stop token with which the text after a turn begins, where a template ends no turn by itself.

        `messages`: the conversation with the turn as its last message. `new`: the messages after it.
        """
        written, _ = self.render(messages, "end")
        text, _ = self.render([*messages, *new], "answer")
        after = text[len(written) :] if text.startswith(written) else ""
        return next((each for each in stop_ids if after.startswith(self.decode([each]))), None)

    def decode(self, ids: Sequence[int], *, with_control: bool = True) -> str:
        """Return the text of tokens, with or without special ones."""
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=not with_control))

    def render(self, messages: Sequence[Message], ending: Ending) -> tuple[str, list[str]]:
        """Return the text of a conversation, and the contents that stand in it as places: none here."""
        return self.prompts.render(messages, ending), []

    def encode(self, text: str, contents: Sequence[str] = (), *, is_start: bool = False, after: str = "") -> list[int]:
        """Return the tokens of a rendered text; `is_start`: with the BOS token of a prompt; `after`: the text before.

        A tokenizer may begin each text with a space, as those of Llama 2 do; a text that goes on begins without it.
        """
        if is_start:
            return self.prompts.encode([text])[0]
        for before in (after, "\n") if after and self._adds_space else ():
            start, whole = encode_texts(self._tokenizer, [before, before + text])
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return encode_texts(self._tokenizer, [text])[0]

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer begins a text in another way than it goes on."""
        with suppress(DataError):  # it may not know the letter
            alone, following = encode_texts(self._tokenizer, ["a", "\na"])
            return following[-len(alone) :] != alone
        return False


def _ending(messages: Sequence[Message], may_continue: bool) -> Ending:
    return "continue" if may_continue and is_begun(messages) else "answer"


def _difference(before: str, after: str) -> str:
    """Return where a text that should begin with another one differs from it."""
    same = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(map(len, (before, after)))
    )
    start = max(0, same - 20)
    return f"the template changes what came before: {before[start : same + 40]!r} became {after[start : same + 40]!r}"
