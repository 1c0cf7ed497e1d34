"""Whole conversations as a reward model reads them: its value is that of the last token."""

from collections.abc import Sequence
from typing import Any

import torch

from hybridflow.data.chat_prompts import PromptEncoder
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
    width = max(map(len, ids))
    tokens = torch.zeros(len(ids), width + 1, dtype=torch.int64)
    is_real = torch.ones(len(ids), width + 1, dtype=torch.int64)
    for row, of_text in enumerate(ids):
        tokens[row, width - len(of_text) : width] = torch.tensor(of_text)
        is_real[row, : width - len(of_text)] = 0
    mask = torch.ones(len(ids), 1, dtype=torch.bool)
    return DataProto.from_dict({"input_ids": tokens, "attention_mask": is_real, "response_mask": mask})
