"""Chat messages as the token ids of a prompt: by the chat template or as plain text, with one BOS token at most."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from hybridflow.data.parquet_rows import Row, shorten, shorten_text
from hybridflow.errors import DataError
from hybridflow.runtime.deadline import DeadlineExceeded, call_within
from hybridflow.runtime.observe import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

RENDERING_LIMIT_S = 10.0
"""Seconds that a chat template may take for one prompt; a good one takes less than a millisecond."""

Message = dict[str, Any]
Schema = dict[str, Any]
"""A JSON schema of a tool."""

Ending = Literal["answer", "continue", "end"]
"""How a text ends: with the header of the next answer, within the last message, or as the conversation has ended."""

KEYS_OF_MESSAGES = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "weight"))
"""Keys that a message may have, whether or not the chat template reads them."""

_READ_KEY = re.compile(r"""\.(\w+)|['"](\w+)['"]""")
"""How a chat template reads the key of a message."""

PROBE = "<hybridflow probe of the chat template>"
"""An answer that no prompt contains, to see what a chat template writes before it."""


def read_messages(row: Row, column: str = "prompt") -> list[Message]:
    """Return the chat messages in a column of a row, without their null fields; raise DataError if one is malformed."""
    messages = row.values[column]
    if not isinstance(messages, list):
        raise DataError(
            f"{row.place}: column '{column}' must be a list of chat messages such as "
            f"[{{'role': 'user', 'content': '...'}}], got {shorten(messages)}."
        )
    if not messages:
        raise DataError(f"{row.place}: column '{column}' has no messages.")
    return [_read_message(row, column, number, message) for number, message in enumerate(messages)]


def _read_message(row: Row, column: str, number: int, message: object) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(
            f"{row.place}: message {number} of '{column}' needs a role and a content, got {shorten(message)}."
        )
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content, f"{row.place}: message {number} of '{column}'")
    if (
        content is None
        and message["role"] == "assistant"
        and (message.get("tool_calls") or message.get("reasoning_content"))
    ):
        content = ""
    if not isinstance(content, str):
        raise DataError(
            f"{row.place}: the content of message {number} of '{column}' must be a text, got {shorten(content)}."
        )
    return {key: value for key, value in {**message, "content": content}.items() if value is not None}


def _joined(parts: list[object], place: str) -> str:
    """Return the text of a message whose content is a list of text parts; raise DataError for another part."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise DataError(
                f"{place} has a part that is not a text: {shorten(part)}; images, audio and video are not supported "
                "yet, give its content as one text or as text parts."
            )
        texts.append(text)
    return "".join(texts)


class PromptEncoder:
    """Encodes chat messages with a tokenizer.

    If `chat_template` is true and the tokenizer has a template, the template renders the messages. Otherwise their
    contents are joined by newlines, after the BOS token if the tokenizer adds one.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", chat_template: bool) -> None:
        if chat_template and isinstance(tokenizer.chat_template, str) and not tokenizer.chat_template.strip():
            raise DataError(
                "the tokenizer's chat template is empty, so that every prompt would have no text; restore it from the "
                "model's original directory, or set data.chat_template=false."
            )
        self._tokenizer = tokenizer
        self.uses_template = chat_template and bool(tokenizer.chat_template)
        bos = cast(int | None, tokenizer.bos_token_id)
        begins_with_bos = bos is not None and tokenizer("")["input_ids"][:1] == [bos]
        self._needs_generation_prompt_check = self.uses_template
        self._prefix = [bos] if bos is not None and begins_with_bos and not self.uses_template else []
        templates = cast(str | dict[str, str] | None, tokenizer.chat_template) or ""
        texts = templates.values() if isinstance(templates, dict) else [templates]
        self._roles = {"user", "assistant", "tool"}
        self._known_keys = KEYS_OF_MESSAGES.union("".join(key) for text in texts for key in _READ_KEY.findall(text))

    def text(self, messages: Sequence[Message], place: str) -> str:
        """Return the prompt as text; if its last message is the assistant's, the answer goes on where that ends.

        Raises DataError, naming `place`, if the chat template rejects the messages, or does not read one of their keys.
        """
        with named(place):
            messages = self.checked(messages)
            if is_begun(messages) and (ends := [end for end in self._ends if end in messages[-1]["content"]]):
                raise DataError(f"the last message has the stop token {ends[0]!r}, which ends the answer; remove it.")
            text = self.render(messages, "continue" if is_begun(messages) else "answer")
            if self._needs_generation_prompt_check:
                self._needs_generation_prompt_check = False
                self._check_generation_prompt(messages, text)
            return text

    def checked(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages without their weights. Raises DataError for a weight or a key that has no meaning."""
        for number, message in enumerate(messages):
            if unknown := [key for key in message if key not in self._known_keys]:
                raise DataError(
                    f"message {number} has the key {unknown[0]!r}, which the chat template does not read; remove it, "
                    "for example by data.map. An answer that is not to be learned has weight = 0."
                )
            weight = message.get("weight", 0)
            if weight not in (0, 1) or (weight and message["role"] != "assistant"):
                raise DataError(
                    f"message {number}, of the role {message['role']}, has weight={shorten(weight)}; expected 0 or 1, "
                    "and 1 only in a message of the assistant, which is then learned."
                )
            if message["role"] not in self._roles:
                self._require_role(messages, number)
        return [{key: value for key, value in message.items() if key != "weight"} for message in messages]

    def _require_role(self, messages: Sequence[Message], number: int) -> None:
        """Raise DataError if a prompt is the same text whatever the message of a new role says."""
        message, following = messages[number], messages[number + 1 :]
        size = next((n for n, each in enumerate(following, 1) if each["role"] == "user"), len(following))
        written = set[str]()
        with suppress(DataError):  # a template may refuse the messages, which is said where they are rendered
            for content in (PROBE, "a"):
                prompt = [*messages[:number], {**message, "content": content}, *following[:size]]
                written.add(self.render(prompt, "answer"))
        if len(written) == 1:
            raise DataError(
                f"message {number} has the role {message['role']!r}, which the chat template does not write, so no "
                "model would see it; give it another role, or put its text into a message of the user (data.map)."
            )
        self._roles.add(message["role"])

    def render(self, messages: Sequence[Message], ending: Ending, tools: Sequence[Schema] = ()) -> str:
        """Return the text of messages, which ends as `ending` says; raise DataError if the template rejects them."""
        if not self.uses_template:
            return "\n".join(message["content"] for message in messages)
        if ending == "continue":
            if not any(messages[-1].get(key) for key in ("content", "reasoning_content", "tool_calls")):
                messages, ending = messages[:-1], "answer"  # which a template that trims texts writes as a whole
            elif messages[-1].get("tool_calls"):
                raise DataError("the last message has tool_calls, which a model cannot continue; add their results.")
        try:
            text = str(call_within(RENDERING_LIMIT_S, self._apply_template, messages, ending, tools))
        except DeadlineExceeded as error:
            raise DataError(
                f"the chat template took longer than {RENDERING_LIMIT_S} s for one prompt; copy it from the "
                "model's original directory, or set data.chat_template=false."
            ) from error
        except Exception as error:  # a template is a program
            reason = shorten_text(str(error) or type(error).__name__, 500).rstrip(".")
            if ending == "continue":
                reason = f"{reason}; the last message is the assistant's, which the template cannot continue"
            raise DataError(f"the chat template rejects the messages: {reason}.") from error
        if ending == "answer" or not is_begun(messages):
            return text
        return self._with_begun_reasoning(text, messages, tools)

    def _with_begun_reasoning(self, text: str, messages: Sequence[Message], tools: Sequence[Schema]) -> str:
        """Return the text of an answer without the closed reasoning that Qwen3 writes before reasoning it has begun."""
        said = messages[-1]["content"].strip()
        opened = re.match(r"<(\w+)>", said)
        if not opened or (closing := f"</{opened[1]}>") in said or len(messages) == 1:
            return text
        header = self.render(messages[:-1], "answer", tools)
        inserted, _, rest = text.removeprefix(header).rpartition(said)
        if not text.startswith(header) or closing not in inserted:
            return text
        if header.rstrip().endswith(opened[0]):
            header = header.rstrip().removesuffix(opened[0])
        return header + said + rest

    @cached_property
    def _takes_texts(self) -> bool:
        """Whether the chat template takes the arguments of calls as JSON texts, as those of DeepSeek do."""
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            written = str(self._as_written([{"role": "user", "content": "a"}, said], "end", ()))
        except Exception:  # a template is a program
            return True
        return str(call["function"]["arguments"]) in written

    def _apply_template(self, messages: Sequence[Message], ending: Ending, tools: Sequence[Schema]) -> object:
        if any(message.get("tool_calls") for message in messages) and self._takes_texts:
            messages = [with_texts(message) for message in messages]
        return self._as_written(messages, ending, tools)

    def _as_written(self, messages: Sequence[Message], ending: Ending, tools: Sequence[Schema]) -> object:
        return self._tokenizer.apply_chat_template(
            cast(Any, messages),
            tools=cast(Any, tools or None),
            add_generation_prompt=ending == "answer",
            continue_final_message=ending == "continue",
            tokenize=False,
        )

    def _check_generation_prompt(self, messages: Sequence[Message], prompt: str) -> None:
        """Warn, once for each chat template, if it writes no generation prompt although an answer begins with one."""
        if prompt != self.render(messages, "end"):
            return
        with suppress(DataError):  # a template may refuse the probe
            answered = self.render([*messages, {"role": "assistant", "content": PROBE}], "end")
            header = answered.removeprefix(prompt).partition(PROBE)[0]
            if header.strip():  # [INST] templates need none: the answer follows the prompt directly
                _warn_without_generation_prompt(header)

    @cached_property
    def _ends(self) -> set[str]:
        """The texts of the tokens that end an answer."""
        ends = (self._tokenizer.eos_token_id, self.end_of_turn() if self.uses_template else None)
        return {str(self._tokenizer.decode([end])) for end in ends if isinstance(end, int)} - {""}

    def end_of_turn(self) -> int | None:
        """Return the special token that the chat template writes after each answer; None if it writes none."""
        asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}
        try:
            texts = [self.render([asked, said], "end"), self.render([asked, said, asked], "answer")]
        except DataError:  # a template may refuse the probe
            return None
        after = [text.rpartition(PROBE)[2].lstrip() for text in texts]
        special = [(token.content, id) for id, token in self._tokenizer.added_tokens_decoder.items() if token.special]
        found = [each for each in special if each[0] and all(text.startswith(each[0]) for text in after)]
        return max(found, key=lambda each: len(each[0]))[1] if found else None

    def encode(self, texts: list[str], places: Sequence[str] = ()) -> list[list[int]]:
        """Return the token ids of prompt texts; special tokens in a text are recognized, only BOS is added."""
        encoded = encode_texts(self._tokenizer, texts, places)
        return [ids if ids[:1] == self._prefix else self._prefix + ids for ids in encoded]


def with_texts(message: Message) -> Message:
    """Return a message with the arguments of its calls as JSON texts."""
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls") or ()
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def is_begun(messages: Sequence[Message]) -> bool:
    """Return whether a prompt ends with the beginning of an answer, which a model continues."""
    return bool(messages) and messages[-1]["role"] == "assistant"


@contextmanager
def named(place: str) -> Iterator[None]:
    """Let errors begin with the place of what was read."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{place}: {error}") from error.__cause__


@cache
def _warn_without_generation_prompt(header: str) -> None:
    logger.warning(
        "the chat template renders the same text with and without add_generation_prompt: prompts end before %r, which "
        "begins each answer, so the model must write it first and learns from degraded prompts; end the template with "
        "{%% if add_generation_prompt %%}...{%% endif %%}, or set data.chat_template=false "
        "(samples.jsonl has the rendered prompts).",
        header,
    )


def encode_texts(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], places: Sequence[str] = ()
) -> list[list[int]]:
    """Return the token ids of texts without added special tokens.

    Raises DataError for a text that cannot be encoded, with its place if `places` of the texts are given.
    """
    if not texts:
        return []
    try:
        return cast(list[list[int]], tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    except DataError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception, for example for a missing unknown token
        if len(texts) > 1:
            for text, place in zip(texts, places or [""] * len(texts), strict=True):
                encode_texts(tokenizer, [text], [place])
        place, fix = f"{places[0]}: " if places and places[0] else "", ""
        with suppress(UnicodeEncodeError):
            texts[0].encode()
            if "unk" in str(error).lower():
                fix = "; give the tokenizer an unknown token, or use one whose vocabulary covers the text"
            raise DataError(
                f"{place}the tokenizer cannot encode the text {shorten(texts[0])}: {shorten_text(str(error))}{fix}."
            ) from error
        raise DataError(f"{place}the text {shorten(texts[0])} is not valid Unicode; correct it.") from error
