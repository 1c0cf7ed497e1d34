"""Whole conversations as a reward model reads them: the score is its value at the last token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from hybridflow.data.chat_prompts import PromptEncoder
from hybridflow.data.layout import pad_left
from hybridflow.errors import DataError
from hybridflow.protocol import DataProto


def encode_conversations(
    encoder: PromptEncoder, prompts: Sequence[Any], responses: Sequence[str], places: Sequence[str]
) -> list[list[int]]:
    """Return the token ids of each prompt (chat messages, or a user's text) with its response, by the chat template.

    Raises DataError, naming its place, for a conversation without tokens.
    """
    texts = []
    for prompt, response, place in zip(prompts, responses, places, strict=True):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages.append({"role": "assistant", "content": response})
        texts.append(encoder.text(messages, place, add_generation_prompt=False))
    ids = encoder.encode(texts)
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
