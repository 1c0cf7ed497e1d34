"""The supervised dataset: prompts with the responses to imitate, in the layout of RL batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.data.chat_prompts import read_messages
from hybridflow.data.data_rows import PLAIN, read_data_rows
from hybridflow.data.example_dataset import ExampleDataset, require_limits
from hybridflow.data.layout import collate_rows
from hybridflow.data.parquet_rows import Row
from hybridflow.data.row_forms import RowForm
from hybridflow.data.tokenizer import pad_token_id
from hybridflow.data.tool_messages import read_conversation
from hybridflow.data.turns import TurnEncoder, Turns
from hybridflow.errors import DataError
from hybridflow.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SFTDataset(ExampleDataset[Turns]):
    """Supervised examples of one or several files.

    The columns are `prompt` (chat messages) and `response` (text), or `messages`: conversations in which each answer of
    the assistant counts whose `weight` is not 0. `TurnEncoder` makes tokens of them, which may be several examples of
    one conversation; with `encode_episode` also of those with tools (the column `tools`, calls, or results). An example
    whose prompt or response has more tokens than its limit is dropped and logged; the prompt of a conversation is the
    text before the first answer that counts. `order_by` names a column, or an entry of `extra_info`, with a number for
    each row. Raises DataError, naming file, row and column, for a malformed file.
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
        encode_episode: TurnEncoder | None = None,
    ) -> None:
        require_limits(max_prompt_length, max_response_length, max_samples)
        self._pad_id = pad_token_id(tokenizer)
        encoder = encode_episode
        if encoder is None or not chat_template:
            encoder = TurnEncoder(tokenizer, encoder and encoder.stop_ids, chat_template)
        rows = read_data_rows(files, "examples", form, order_by, max_samples)
        if "messages" in rows[0].values:
            found = [_of_conversation(row, encoder) for row in rows]
        else:
            found = [[_of_response(row, encoder)] for row in rows]
        rows = [row for row, turns in zip(rows, found, strict=True) for _ in turns]
        examples = [each for turns in found for each in turns]
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


def _of_conversation(row: Row, encoder: TurnEncoder) -> list[Turns]:
    return encoder(*read_conversation(row), row.place)


def _of_response(row: Row, encoder: TurnEncoder) -> Turns:
    prompt, (response,) = encoder.responses(read_messages(row), [row.text("response")], row.place)
    return Turns(prompt, response, [True] * len(response))
