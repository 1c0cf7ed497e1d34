"""Whole conversations as a reward model reads them: its value is that of the last token."""

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
    """Token ids of each prompt (chat messages, or a text of the user) with the response to it, by the chat template.

    Raises DataError, with its place, for one without tokens.
    """
    texts = []
    for prompt, response, place in zip(prompts, responses, places, strict=True):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages.append({"role": "assistant", "content": response})
        texts.append(encoder.text(messages, place, add_generation_prompt=False))
    ids = encoder.encode(texts)
    for of_text, place in zip(ids, places, strict=True):
        if not of_text:
            raise DataError(f"{place} and its prompt have no tokens to score.")
    return ids


def collate_conversations(ids: Sequence[Sequence[int]]) -> DataProto:
    """Rows whose one response token, which nobody looks at, follows the text: a value is read before its token."""
    tokens, is_real = pad_left(ids, 0)
    mask = torch.ones(len(ids), 1, dtype=torch.bool)
    tensors = {"input_ids": pad(tokens, (0, 1)), "attention_mask": pad(is_real, (0, 1), value=1), "response_mask": mask}
    return DataProto.from_dict(tensors)
