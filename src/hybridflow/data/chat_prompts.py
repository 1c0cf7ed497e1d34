"""Chat messages as the token ids of a prompt: by the chat template or as plain text, with one BOS token at most."""

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, cast

from hybridflow.data.parquet_rows import Row, shorten
from hybridflow.errors import DataError
from hybridflow.runtime.deadline import DeadlineExceeded, call_within
from hybridflow.runtime.observe import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

RENDERING_LIMIT_S = 10.0
"""Seconds that a chat template may take for one prompt; a good one takes less than a millisecond."""

PROBE = "<hybridflow probe of the chat template>"
"""An answer that no prompt contains, to see what a chat template writes before it."""


def read_messages(row: Row, column: str = "prompt") -> list[dict[str, str]]:
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


def _read_message(row: Row, column: str, number: int, message: object) -> dict[str, str]:
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

    def text(self, messages: list[dict[str, str]], place: str, *, add_generation_prompt: bool = True) -> str:
        """Return the prompt as text; `add_generation_prompt=False` is for a conversation that has ended.

        Raises DataError, naming `place`, if the chat template rejects the messages.
        """
        if not self.uses_template:
            return "\n".join(message["content"] for message in messages)
        text = self._render(messages, place, add_generation_prompt)
        if add_generation_prompt and self._needs_generation_prompt_check:
            self._needs_generation_prompt_check = False
            self._check_generation_prompt(messages, text, place)
        return text

    def _render(self, messages: list[dict[str, str]], place: str, add_generation_prompt: bool) -> str:
        try:
            text = call_within(RENDERING_LIMIT_S, self._apply_template, messages, add_generation_prompt)
        except DeadlineExceeded as error:
            raise DataError(
                f"{place}: the tokenizer's chat template took longer than {RENDERING_LIMIT_S} s for one prompt; copy "
                "it from the model's original directory, or set data.chat_template=false."
            ) from error
        except Exception as error:  # a template is a program
            reason = str(error) or type(error).__name__
            raise DataError(f"{place}: the tokenizer's chat template rejects the messages: {reason}.") from error
        return str(text)

    def _apply_template(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> object:
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False
        )

    def _check_generation_prompt(self, messages: list[dict[str, str]], prompt: str, place: str) -> None:
        """Warn, once for each chat template, if it writes no generation prompt although an answer begins with one."""
        if prompt != self._render(messages, place, add_generation_prompt=False):
            return
        with suppress(DataError):  # a template may refuse the probe
            answered = self._render([*messages, {"role": "assistant", "content": PROBE}], place, False)
            header = answered.removeprefix(prompt).partition(PROBE)[0]
            if header.strip():  # [INST] templates need none: the answer follows the prompt directly
                _warn_without_generation_prompt(header)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of prompt texts; special tokens in a text are recognized, only BOS is added."""
        encoded = encode_texts(self._tokenizer, texts)
        return [ids if ids[:1] == self._prefix else self._prefix + ids for ids in encoded]


@cache
def _warn_without_generation_prompt(header: str) -> None:
    logger.warning(
        "the chat template renders the same text with and without add_generation_prompt: prompts end before %r, which "
        "begins each answer, so the model must write it first and learns from degraded prompts; end the template with "
        "{%% if add_generation_prompt %%}...{%% endif %%}, or set data.chat_template=false "
        "(samples.jsonl has the rendered prompts).",
        header,
    )


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[list[int]]:
    """Return the token ids of texts without added special tokens; raise DataError if one cannot be encoded."""
    if not texts:
        return []
    try:
        return cast(list[list[int]], tokenizer(texts, add_special_tokens=False)["input_ids"])
    except Exception as error:  # the tokenizers library raises bare Exception, for example for a missing unknown token
        raise DataError(
            f"the tokenizer cannot encode the texts: {error}; give it an unknown token, or a vocabulary that covers "
            "them."
        ) from error


def encode_responses(tokenizer: "PreTrainedTokenizerBase", texts: list[str], eos_id: int) -> list[list[int]]:
    """Return the token ids of responses, each with exactly one EOS token at its end."""
    return [ids if ids[-1:] == [eos_id] else [*ids, eos_id] for ids in encode_texts(tokenizer, texts)]
