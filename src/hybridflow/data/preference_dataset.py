"""The preference dataset, for DPO or for a reward model, and conversations as a reward model reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.functional import pad

from hybridflow.data.chat_prompts import PromptEncoder, named, read_messages
from hybridflow.data.data_rows import PLAIN, read_data_rows
from hybridflow.data.example_dataset import ExampleDataset, require_limits
from hybridflow.data.layout import collate_rows, pad_left
from hybridflow.data.row_forms import RowForm
from hybridflow.data.tokenizer import pad_token_id
from hybridflow.data.turns import TurnEncoder, answered
from hybridflow.errors import DataError
from hybridflow.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_conversations(
    encoder: PromptEncoder, prompts: Sequence[Any], responses: Sequence[str], places: Sequence[str]
) -> list[list[int]]:
    """Return the token ids of each prompt (chat messages, or a user's text) with its response, by the chat template.

    Raises DataError, naming its place, for a conversation without tokens.
    """
    texts = []
    for prompt, response, place in zip(prompts, responses, places, strict=True):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        with named(place):
            texts.append(encoder.render(answered(messages, response), "end"))
    ids = encoder.encode(texts, places)
    for conversation, place in zip(ids, places, strict=True):
        if not conversation:
            raise DataError(f"{place} and its prompt have no tokens to score.")
    return ids


def collate_conversations(ids: Sequence[Sequence[int]]) -> DataProto:
    """Return one row for each conversation, with a dummy response token after it.

    A value is read one position before its response token, so the value of the dummy is that of the conversation's
    last token. Columns: `input_ids`, `attention_mask` (rows, longest + 1), `response_mask` (rows, 1).
    """
    tokens, is_real = pad_left(ids, 0)
    mask = torch.ones(len(ids), 1, dtype=torch.bool)
    tensors = {"input_ids": pad(tokens, (0, 1)), "attention_mask": pad(is_real, (0, 1), value=1), "response_mask": mask}
    return DataProto.from_dict(tensors)


SIDES = ("chosen", "rejected")


Pair = list[tuple[list[int], list[int]]]
"""Token ids (prompt, response) of the chosen and of the rejected response."""


class PreferenceDataset(ExampleDataset[Pair]):
    """Pairs of one or several files with columns `prompt`, `chosen` and `rejected`, in any shape that TRL has.

    `layout` "policy": prompts and responses, as `TurnEncoder` makes them with `stop_ids`. "reward_model": whole
    conversations by the chat template, as `RewardModelWorker` scores them. A pair with a prompt or a response of more
    tokens than its limit is dropped and logged; the limit of a whole conversation is the sum of both. `order_by` names
    a column, or an entry of `extra_info`, with a number for each row. Raises DataError, naming file, row and column,
    for a malformed file.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: "PreTrainedTokenizerBase",
        max_prompt_length: int,
        max_response_length: int,
        layout: Literal["policy", "reward_model"] = "policy",
        chat_template: bool = True,
        max_samples: int = 0,
        order_by: str = "",
        form: RowForm = PLAIN,
        stop_ids: Sequence[int] | None = None,
    ) -> None:
        require_limits(max_prompt_length, max_response_length, max_samples)
        self._layout, self._pad_id = layout, pad_token_id(tokenizer)
        rows = read_data_rows(files, "pairs", form, order_by, max_samples)
        texts = {side: [row.text(side) for row in rows] for side in SIDES}
        for row, chosen, rejected in zip(rows, texts["chosen"], texts["rejected"], strict=True):
            if chosen == rejected:
                raise DataError(
                    f"{row.place}: 'chosen' and 'rejected' are the same text; the responses of a pair must differ."
                )
        messages, places = [read_messages(row) for row in rows], [row.place for row in rows]
        turns = TurnEncoder(tokenizer, stop_ids, chat_template)
        pairs: list[Pair]
        if layout == "reward_model":
            for number, place in enumerate(places):
                with named(place):
                    messages[number] = turns.checked(messages[number])
                    for side in SIDES:
                        texts[side][number] = turns.said(texts[side][number])
            sides = [encode_conversations(turns.prompts, messages, texts[side], places) for side in SIDES]
            pairs = [[(chosen, []), (rejected, [])] for chosen, rejected in zip(*sides, strict=True)]
            limits = (max_prompt_length + max_response_length - 1, max_response_length)  # the dummy response token
        else:
            found = [
                turns.responses(prompt, (chosen, rejected), place)
                for prompt, chosen, rejected, place in zip(messages, *texts.values(), places, strict=True)
            ]
            pairs = [[(prompt, ids) for ids in responses] for prompt, responses in found]
            limits = (max_prompt_length, max_response_length)
        for place, pair in zip(places, pairs, strict=True):
            if not pair[0][0]:
                raise DataError(f"{place}: the prompt has no tokens.")
            if pair[0] == pair[1]:
                raise DataError(
                    f"{place}: 'chosen' and 'rejected' have the same tokens; the responses of a pair must differ."
                )
        lengths = [(max(len(p) for p, _ in pair), max(len(r) for _, r in pair)) for pair in pairs]
        super().__init__(rows, pairs, lengths, limits, "pairs", order_by)
        self.longest += int(layout == "reward_model")

    def _tokens(self, example: Pair) -> list[Any]:
        return [self._layout, example]

    def collate(self, indices: Sequence[int]) -> DataProto:
        """Return two rows for each pair at `indices`, the chosen one first; `group_ids` (rows,) counts pairs from 0.

        The columns are those of `SFTDataset.collate`, for the layout "reward_model" those of `collate_conversations`.
        """
        rows = [side for pair in self._at(indices) for side in pair]
        if self._layout == "reward_model":
            batch = collate_conversations([ids for ids, _ in rows])
        else:
            batch = collate_rows([(prompt, ids, [True] * len(ids)) for prompt, ids in rows], self._pad_id)
        return batch.union(DataProto.from_dict({"group_ids": torch.arange(len(indices)).repeat_interleave(2)}))
