"""Generation of responses to given prompts, without scores or training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.config import Config
from hybridflow.controller import Backend, WorkerGroup
from hybridflow.data.chat_prompts import PromptEncoder, read_messages
from hybridflow.data.layout import pad_left
from hybridflow.data.parquet_rows import Row, read_rows
from hybridflow.data.tokenizer import pad_token_id
from hybridflow.errors import DataError
from hybridflow.protocol import DataProto
from hybridflow.trainers.groups import BackendOwner
from hybridflow.trainers.rl_metrics import prompt_text
from hybridflow.trainers.validation import VALIDATION_STREAM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def typed_prompts(texts: Sequence[str]) -> list[Row]:
    """Return each text as a prompt of one user message."""
    return [Row(f"prompt {i}", {"prompt": [{"role": "user", "content": text}]}) for i, text in enumerate(texts)]


def prompts_of_files(files: str | Sequence[str]) -> list[Row]:
    """Return the rows of the column `prompt` (chat messages) of parquet files."""
    return read_rows(files, ("prompt",))


class TextGenerator(BackendOwner):
    """Generates as validation does: `validation.group_size` responses for each prompt, at `validation.temperature`."""

    def __init__(
        self,
        config: Config,
        tokenizer: "PreTrainedTokenizerBase",
        rollout: WorkerGroup,
        backend: Backend | None = None,
    ) -> None:
        self.config, self.tokenizer, self.rollout, self.backend = config, tokenizer, rollout, backend

    def run(self, prompts: Sequence[Row]) -> list[dict[str, Any]]:
        """Return one row for each prompt, in order: `prompt`, `responses`, `finish_reasons`.

        Raises DataError, before anything is generated, for a prompt that is empty or longer than
        data.max_prompt_length.
        """
        encoder = PromptEncoder(self.tokenizer, self.config.data.chat_template)
        messages = [read_messages(row) for row in prompts]
        prompt_ids = encoder.encode(
            [encoder.text(message, row.place) for message, row in zip(messages, prompts, strict=True)]
        )
        limit = self.config.data.max_prompt_length
        for row, ids in zip(prompts, prompt_ids, strict=True):
            if not 0 < len(ids) <= limit:
                raise DataError(f"{row.place} has {len(ids)} tokens; it must have 1 to data.max_prompt_length={limit}.")
        size = self.config.validation.batch_size
        rows = []
        for start in range(0, len(prompts), size):
            rollouts = self._generate(prompt_ids[start : start + size], start).non_tensor_batch
            texts, reasons = rollouts["solution_texts"].tolist(), rollouts["finish_reasons"].tolist()
            rows += list(zip(_grouped(texts, self._group_size), _grouped(reasons, self._group_size), strict=True))
        return [
            {"prompt": prompt_text(message), "responses": responses, "finish_reasons": reasons}
            for message, (responses, reasons) in zip(messages, rows, strict=True)
        ]

    @property
    def _group_size(self) -> int:
        return self.config.validation.group_size

    def _generate(self, prompt_ids: list[list[int]], first: int) -> DataProto:
        ids, mask = pad_left(prompt_ids, pad_token_id(self.tokenizer))
        group_ids = torch.arange(first, first + len(prompt_ids))
        return self.rollout.generate_validation_sequences(
            DataProto.from_dict(
                {"prompts": ids, "prompt_mask": mask.bool(), "group_ids": group_ids},
                meta_info={"noise_key": [self.config.trainer.seed, VALIDATION_STREAM, 0]},
            )
        )


def _grouped(values: list[str], size: int) -> list[list[str]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
