"""The supervised dataset: prompts with the responses to imitate, in the layout of RL batches."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.data.chat_prompts import PromptEncoder, encode_responses, read_messages
from hybridflow.data.data_rows import PLAIN, read_data_rows
from hybridflow.data.example_dataset import ExampleDataset, require_limits
from hybridflow.data.layout import collate_rows
from hybridflow.data.parquet_rows import Row, columns_of
from hybridflow.data.row_forms import RowForm
from hybridflow.data.tokenizer import eos_token_id, pad_token_id
from hybridflow.data.tool_messages import Message, Schema, read_conversation, uses_tools, without_nulls_of_columns
from hybridflow.data.turns import ChangedTurns, Turns, encode_turns
from hybridflow.errors import DataConfigError, DataError
from hybridflow.protocol import DataProto
from hybridflow.runtime.observe import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

EncodeEpisode = Callable[[list[Message], list[Schema], str], list[Turns]]
"""A function (messages, tools, place) -> rows in which each turn of the assistant counts once, as in an episode."""


class SFTDataset(ExampleDataset[Turns]):
    """Supervised examples of one or several parquet files.

    The columns are `prompt` (chat messages) and `response` (text), or `messages`: conversations in which each answer of
    the assistant counts. A response ends in the tokenizer's EOS token, which counts. An example whose prompt or
    response has more tokens than its limit is dropped and logged; the prompt of a conversation is the text before the
    first answer. `encode_episode` encodes conversations with tools (the column `tools`, calls, or results), and those
    whose earlier turns the chat template changes when others follow; it may make several examples of one. `order_by`
    names a column, or an entry of `extra_info`, with a number for each row. Raises DataError,
    naming file, row and column, for a malformed file.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: "PreTrainedTokenizerBase",
        max_prompt_length: int,
        max_response_length: int,
        chat_template: bool = True,
        max_samples: int = 0,
        order_by: str = "",
        form: RowForm = PLAIN,
        encode_episode: EncodeEpisode | None = None,
    ) -> None:
        require_limits(max_prompt_length, max_response_length, max_samples)
        self._pad_id = pad_token_id(tokenizer)
        eos_id = eos_token_id(tokenizer)
        encoder = PromptEncoder(tokenizer, chat_template)
        if {"messages", "response"} <= set(columns_of(files)):
            logger.warning("the files have the columns `messages` and `response`; `response` is ignored")
        rows = read_data_rows(files, "examples", form, order_by, max_samples)
        if "messages" in rows[0].values:
            found = [_of_conversation(row, tokenizer, encoder, eos_id, encode_episode) for row in rows]
            rows = [row for row, turns in zip(rows, found, strict=True) for _ in turns]
            examples = [each for turns in found for each in turns]
        else:
            examples = _single_turns(rows, tokenizer, encoder, eos_id)
        for row, example in zip(rows, examples, strict=True):
            if not example.prompt:
                raise DataError(f"{row.place}: the prompt has no tokens.")
        lengths = [(len(example.prompt), len(example.response)) for example in examples]
        super().__init__(rows, examples, lengths, (max_prompt_length, max_response_length), "examples", order_by)

    def _tokens(self, example: Turns) -> list[Any]:
        return [example.prompt, example.response, example.counts]

    def collate(self, indices: Sequence[int]) -> DataProto:
        """Return the examples at `indices` as a batch of tensors.

        The columns are those of `collate_rows`; `response_mask` is False at turns that are not the assistant's.
        """
        return collate_rows([(e.prompt, e.response, e.counts) for e in self._at(indices)], self._pad_id)


def _of_conversation(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    encoder: PromptEncoder,
    eos_id: int,
    encode_episode: EncodeEpisode | None,
) -> list[Turns]:
    """Encode a row with `messages`."""
    ((_, values),) = without_nulls_of_columns([(row.place, row.values)])
    messages, tools = read_conversation(Row(row.place, values))
    if not uses_tools(messages, tools):
        try:
            return [encode_turns(tokenizer, encoder, messages, eos_id, row.place)]
        except ChangedTurns:
            if encode_episode is None:
                raise
    elif encode_episode is None or not encoder.uses_template:
        raise DataConfigError(
            f"{row.place}: the conversation has tools, calls or results of tools, which need a chat template; use a "
            "tokenizer with one and data.chat_template = true (in Python also SFTDataset(encode_episode=...))."
        )
    return encode_episode(messages, tools, row.place)


def _single_turns(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", encoder: PromptEncoder, eos_id: int
) -> list[Turns]:
    """Encode rows of one prompt and one response."""
    prompts = encoder.encode([encoder.text(read_messages(row), row.place) for row in rows])
    responses = encode_responses(tokenizer, [row.text("response") for row in rows], eos_id)
    return [
        Turns(prompt, response, [True] * len(response)) for prompt, response in zip(prompts, responses, strict=True)
    ]
