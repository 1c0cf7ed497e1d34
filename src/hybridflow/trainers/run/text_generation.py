"""Generation of responses to typed prompts or prompt files, without scores or training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.config import Config
from hybridflow.controller import Backend, WorkerGroup
from hybridflow.data.chat_prompts import PromptEncoder, read_messages
from hybridflow.data.layout import pad_left
from hybridflow.data.parquet_rows import Row
from hybridflow.data.tokenizer import pad_token_id, tokenizer_of
from hybridflow.errors import DataConfigError, DataError
from hybridflow.models.loading import model_config
from hybridflow.models.support import describe_positions, num_positions
from hybridflow.protocol import DataProto
from hybridflow.protocol.meta_info import NOISE_KEY
from hybridflow.runtime.observe import get_logger
from hybridflow.trainers.build.groups import BackendOwner
from hybridflow.trainers.run.samples import prompt_text
from hybridflow.trainers.validation import VALIDATION_STREAM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)


def checked_prompts(config: Config, prompts: Sequence[Row], *, cap_response_length: bool) -> Config:
    """Check prompts before a worker starts; return the configuration with a response length that fits the model.

    If a prompt and its response exceed the model's positions, the length is capped, or without `cap_response_length`
    DataConfigError is raised. Raises DataError for an empty prompt and for one longer than data.max_prompt_length.
    """
    if not prompts:
        return config
    data, path = config.data, config.model.path
    longest = max(map(len, encode_prompts(config, tokenizer_of(config), prompts)))
    model = model_config(path)
    positions = num_positions(model)
    if positions is None or longest + data.max_response_length <= positions:
        return config
    left = positions - longest
    if left < 1:
        raise DataConfigError(
            f"the longest prompt has {longest} tokens, which leaves no room for a response: the model has "
            f"{describe_positions(model)}; shorten the prompt."
        )
    found = f"data.max_response_length={data.max_response_length} exceeds the {left} of {positions} positions of the "
    found += f"model that a prompt of {longest} tokens leaves"
    if not cap_response_length:
        raise DataConfigError(f"{found}; use at most {left}.")
    logger.info("%s; responses are capped at %d tokens", found, left)
    return config.with_values("data", max_response_length=left)


def with_system(config: Config, prompts: Sequence[Row], text: str) -> list[Row]:
    """Return the prompts with a system message in front.

    Raises DataConfigError if there is no chat template, and for a prompt that begins with a system message.
    """
    if not PromptEncoder(tokenizer_of(config), config.data.chat_template).uses_template:
        reason = "the tokenizer has none" if config.data.chat_template else "data.chat_template=false"
        raise DataConfigError(
            f"--system needs a chat template, but {reason} (model.path='{config.model.path}'); put the text into the "
            "prompt."
        )
    rows = []
    for row in prompts:
        messages = read_messages(row)
        if messages[0]["role"] == "system":
            raise DataConfigError(f"{row.place} begins with a system message; leave --system out.")
        rows.append(Row(row.place, {**row.values, "prompt": [{"role": "system", "content": text}, *messages]}))
    return rows


def encode_prompts(config: Config, tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Row]) -> list[list[int]]:
    """Return the token ids of each prompt.

    Raises DataError for a prompt that is empty or longer than data.max_prompt_length.
    """
    encoder = PromptEncoder(tokenizer, config.data.chat_template)
    places = [row.place for row in prompts]
    prompt_ids = encoder.encode([encoder.text(read_messages(row), row.place) for row in prompts], places)
    limit = config.data.max_prompt_length
    for row, ids in zip(prompts, prompt_ids, strict=True):
        if not 0 < len(ids) <= limit:
            raise DataError(f"{row.place} has {len(ids)} tokens; it must have 1 to data.max_prompt_length={limit}.")
    return prompt_ids


def typed_prompts(texts: Sequence[str]) -> list[Row]:
    """Return each text as a prompt of one user message."""
    return [Row(f"prompt {i}", {"prompt": [{"role": "user", "content": text}]}) for i, text in enumerate(texts)]


class TextGenerator(BackendOwner):
    """A generator of `validation.group_size` responses to each prompt, at `validation.temperature`."""

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

        Raises DataError, before generation starts, for a prompt that is empty or longer than data.max_prompt_length.
        """
        prompt_ids = encode_prompts(self.config, self.tokenizer, prompts)
        size, group_size = self.config.validation.batch_size, self.config.validation.group_size
        rows = []
        for start in range(0, len(prompts), size):
            rollouts = self._generate(prompt_ids[start : start + size], start).non_tensor_batch
            texts, reasons = rollouts["solution_texts"].tolist(), rollouts["finish_reasons"].tolist()
            rows += list(zip(_grouped(texts, group_size), _grouped(reasons, group_size), strict=True))
        return [
            {"prompt": prompt_text(read_messages(row)), "responses": responses, "finish_reasons": reasons}
            for row, (responses, reasons) in zip(prompts, rows, strict=True)
        ]

    def _generate(self, prompt_ids: list[list[int]], first: int) -> DataProto:
        ids, mask = pad_left(prompt_ids, pad_token_id(self.tokenizer))
        group_ids = torch.arange(first, first + len(prompt_ids))
        return self.rollout.generate_validation_sequences(
            DataProto.from_dict(
                {"prompts": ids, "prompt_mask": mask.bool(), "group_ids": group_ids},
                meta_info={NOISE_KEY: [self.config.trainer.seed, VALIDATION_STREAM, 0]},
            )
        )


def _grouped(values: list[str], size: int) -> list[list[str]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
