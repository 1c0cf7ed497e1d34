"""The supervised dataset: prompts with the responses to imitate, in exactly the layout of RL batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridflow.data.chat_prompts import PromptEncoder, encode_texts, read_messages
from hybridflow.data.dataset import check_indices
from hybridflow.data.fingerprint import fingerprint
from hybridflow.data.layout import pad_left, pad_right, position_ids
from hybridflow.data.parquet_rows import read_rows
from hybridflow.data.tokenizer import eos_token_id, pad_token_id
from hybridflow.errors import DataError
from hybridflow.observability import get_logger
from hybridflow.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)


class SFTDataset:
    """Examples of one or several parquet files with columns `prompt` (chat messages) and `response` (text).

    A response ends in the tokenizer's EOS token, which counts. An example whose prompt or response is longer than its
    limit, in tokens, is dropped and reported. Problems of a file are `DataError`s naming file, row and column.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: "PreTrainedTokenizerBase",
        max_prompt_length: int,
        max_response_length: int,
        chat_template: bool = True,
        max_samples: int = 0,
    ) -> None:
        if max_prompt_length < 1 or max_response_length < 1 or max_samples < 0:
            raise DataError(
                f"max_prompt_length={max_prompt_length} and max_response_length={max_response_length} must be at least "
                f"1, max_samples={max_samples} at least 0."
            )
        self._pad_id = pad_token_id(tokenizer)
        eos_id = eos_token_id(tokenizer)
        rows = read_rows(files, ("prompt", "response"), max_rows=max_samples)
        encoder = PromptEncoder(tokenizer, chat_template)
        prompts = encoder.encode([encoder.text(read_messages(row), row.place) for row in rows])
        responses = encode_texts(tokenizer, [row.text("response") for row in rows])

        self._examples: list[tuple[list[int], list[int]]] = []
        dropped: list[str] = []
        for row, prompt, response in zip(rows, prompts, responses, strict=True):
            if not prompt:
                raise DataError(f"{row.place}: the prompt has no tokens.")
            if response[-1:] != [eos_id]:
                response = [*response, eos_id]
            if len(prompt) > max_prompt_length or len(response) > max_response_length:
                dropped.append(f"{row.place}: prompt {len(prompt)}, response {len(response)} tokens")
            else:
                self._examples.append((prompt, response))
        self.num_dropped = len(dropped)
        if dropped:
            message = (
                f"dropped {len(dropped)} of {len(rows)} examples longer than max_prompt_length={max_prompt_length} or "
                f"max_response_length={max_response_length} tokens (the first is {dropped[0]})."
            )
            if not self._examples:
                raise DataError(f"no example is left: {message} Raise the limits.")
            logger.warning("%s", message)
        self._fingerprint = fingerprint(self._examples)

    def __len__(self) -> int:
        """Examples that can be used, without the dropped ones."""
        return len(self._examples)

    @property
    def fingerprint(self) -> str:
        """Hash of the examples' tokens, in order."""
        return self._fingerprint

    def collate(self, indices: Sequence[int]) -> DataProto:
        """The examples at `indices` as a batch of tensors.

        `prompts` (batch, prompt_len) int64 padded on the left, `responses` (batch, response_len) int64 padded on the
        right, `response_mask` (batch, response_len) bool, and `input_ids` = prompts + responses, `attention_mask`,
        `position_ids` (batch, prompt_len + response_len) int64. `meta_info["pad_token_id"]` is the padding value.
        """
        check_indices(indices, len(self))
        prompts, prompt_mask = pad_left([self._examples[i][0] for i in indices], self._pad_id)
        responses, response_mask = pad_right([self._examples[i][1] for i in indices], self._pad_id)
        attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
        tensors = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": response_mask.bool(),
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": position_ids(attention_mask),
        }
        return DataProto.from_dict(tensors=tensors, meta_info={"pad_token_id": self._pad_id})
