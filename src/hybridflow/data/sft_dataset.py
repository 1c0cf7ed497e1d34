"""The supervised dataset: prompts with the responses to imitate, in exactly the layout of RL batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.data.chat_prompts import PromptEncoder, encode_texts, read_messages
from hybridflow.data.dataset import check_indices
from hybridflow.data.fingerprint import fingerprint
from hybridflow.data.layout import collate_rows
from hybridflow.data.overlong import require_limits, short_enough
from hybridflow.data.parquet_rows import Row, columns_of, read_rows
from hybridflow.data.tokenizer import eos_token_id, pad_token_id
from hybridflow.data.turns import Turns, encode_turns
from hybridflow.errors import DataError
from hybridflow.observability import get_logger
from hybridflow.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)


class SFTDataset:
    """Examples of one or several parquet files, with columns `prompt` (chat messages) and `response` (text), or with a
    column `messages`: conversations of which every answer of the assistant counts.

    A response ends in the tokenizer's EOS token, which counts. An example whose prompt or response is longer than its
    limit, in tokens, is dropped and reported; of a conversation the prompt is what comes before the first answer.
    `order_by` names a column, or an entry of `extra_info`, with a number for each row. Problems of a file are
    `DataError`s naming file, row and column.
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
    ) -> None:
        require_limits(max_prompt_length, max_response_length, max_samples)
        self._pad_id = pad_token_id(tokenizer)
        eos_id = eos_token_id(tokenizer)
        encoder = PromptEncoder(tokenizer, chat_template)
        there = columns_of(files)
        columns = ("messages",) if "messages" in there else ("prompt", "response")
        if {"messages", "response"} <= set(there):
            logger.warning(
                "the files have `messages` and `response`; the conversations are learned from, not `response`"
            )
        rows = read_rows(files, columns, ("extra_info", *[order_by] * bool(order_by)), max_rows=max_samples)
        if columns == ("messages",):
            examples = [
                encode_turns(tokenizer, encoder, read_messages(row, "messages"), eos_id, row.place) for row in rows
            ]
        else:
            examples = _single_turns(rows, tokenizer, encoder, eos_id)
        for row, example in zip(rows, examples, strict=True):
            if not example.prompt:
                raise DataError(f"{row.place}: the prompt has no tokens.")
        lengths = [(len(example.prompt), len(example.response)) for example in examples]
        kept = short_enough([row.place for row in rows], lengths, max_prompt_length, max_response_length, "examples")
        self._examples = [examples[i] for i in kept]
        self._numbers = [rows[i].number(order_by) for i in kept] if order_by else None
        self.num_dropped = len(rows) - len(kept)
        self._fingerprint = fingerprint([e.prompt, e.response, e.counts] for e in self._examples)

    def __len__(self) -> int:
        """Examples that can be used, without the dropped ones."""
        return len(self._examples)

    @property
    def fingerprint(self) -> str:
        """Hash of the examples' tokens, in order."""
        return self._fingerprint

    @property
    def numbers(self) -> list[float] | None:
        """The number of each example in the column `order_by`; None without one."""
        return self._numbers

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(len(example.prompt) + len(example.response) for example in self._examples)

    def collate(self, indices: Sequence[int]) -> DataProto:
        """The examples at `indices` as a batch of tensors.

        Columns as `collate_rows` makes them; `response_mask` is False at turns that are not the assistant's.
        """
        check_indices(indices, len(self))
        examples = [self._examples[i] for i in indices]
        return collate_rows([(e.prompt, e.response, e.counts) for e in examples], self._pad_id)


def _single_turns(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", encoder: PromptEncoder, eos_id: int
) -> list[Turns]:
    """A prompt and the one response to it."""
    prompts = encoder.encode([encoder.text(read_messages(row), row.place) for row in rows])
    responses = [
        response if response[-1:] == [eos_id] else [*response, eos_id]
        for response in encode_texts(tokenizer, [row.text("response") for row in rows])
    ]
    return [
        Turns(prompt, response, [True] * len(response)) for prompt, response in zip(prompts, responses, strict=True)
    ]
