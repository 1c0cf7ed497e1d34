"""Generation for workers with a rollout engine, with or without training in the same process."""

from contextlib import AbstractContextManager

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.config import Config, RolloutConfig, ValidationConfig
from hybridflow.controller import make_nd_compute_dataproto_dispatch_fn, register
from hybridflow.data.tokenizer import pad_token_id
from hybridflow.protocol import DataProto
from hybridflow.rollout import Request, RolloutEngine, SamplingParams, generate
from hybridflow.workers.measured import MeasuredWorker
from hybridflow.workers.rollout_batch import rollout_batch

ROLLOUT_MESH = "rollout"
"""Name of the mesh of a group's rollout engines: axes for the engines and for the ranks that share an engine."""

TO_ENGINES = make_nd_compute_dataproto_dispatch_fn(ROLLOUT_MESH, name="TO_ENGINES")
"""Dispatch mode that splits prompts over the rollout engines; ranks of one engine get the same, one is collected."""

PROMPT_COLUMNS = ("prompts", "prompt_mask", "group_ids")
ROLLOUT_COLUMNS = (
    *("responses", "response_mask", "input_ids", "attention_mask", "position_ids"),
    *("rollout_log_probs", "rollout_versions", "finish_reasons", "solution_texts"),
)
GREEDY = ValidationConfig(temperature=0.0, group_size=1)


class GeneratingWorker(MeasuredWorker):
    """A base class of workers that generate with the engine `rollout`, inside `ready_to_generate()`."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    rollout: RolloutEngine

    def ready_to_generate(self) -> AbstractContextManager[None]:
        """Return a context in which the rollout engine has its weights and memory."""
        raise NotImplementedError

    @register(
        TO_ENGINES,
        reads=PROMPT_COLUMNS,
        writes=ROLLOUT_COLUMNS,
        rows=lambda config: config.rollout.group_size,
        parts=lambda config: config.controller.parts,
    )
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate `rollout.group_size` responses for each prompt, in order."""
        return self._generate(prompts, self.config.rollout)

    @register(TO_ENGINES, reads=PROMPT_COLUMNS, writes=ROLLOUT_COLUMNS)
    def generate_greedy_sequences(self, prompts: DataProto) -> DataProto:
        """Generate one response for each prompt by greedy decoding, in order."""
        return self._generate(prompts, GREEDY)

    @register(
        TO_ENGINES,
        reads=PROMPT_COLUMNS,
        writes=ROLLOUT_COLUMNS,
        rows=lambda config: config.validation.group_size,
    )
    def generate_validation_sequences(self, prompts: DataProto) -> DataProto:
        """Generate `validation.group_size` responses for each prompt, in order."""
        return self._generate(prompts, self.config.validation)

    def _generate(self, prompts: DataProto, settings: RolloutConfig | ValidationConfig) -> DataProto:
        sampling = SamplingParams(
            max_new_tokens=self.config.data.max_response_length,
            temperature=settings.temperature,
            top_k=settings.top_k if isinstance(settings, RolloutConfig) else 0,
            top_p=settings.top_p if isinstance(settings, RolloutConfig) else 1.0,
            stop_token_ids=self.stop_ids,
            stop_strings=self.config.rollout.stop_strings,
        )
        noise = tuple(prompts.meta_info["noise_key"])
        columns = prompts.batch
        requests = [
            Request(i, ids[mask].tolist(), sampling, settings.group_size, (*noise, int(group)))
            for i, (ids, mask, group) in enumerate(
                zip(columns["prompts"], columns["prompt_mask"].bool(), columns["group_ids"], strict=True)
            )
        ]
        with self.ready_to_generate():
            completions = generate(self.rollout, requests)
        source = torch.arange(len(prompts)).repeat_interleave(settings.group_size)
        batch = rollout_batch(
            columns["prompts"][source],
            columns["prompt_mask"][source],
            completions,
            pad_token_id(self.tokenizer),
            torch.float64 if self.config.model.dtype == "float64" else torch.float32,
        )
        texts = np.empty(len(completions), dtype=object)
        texts[:] = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        reasons = np.empty(len(completions), dtype=object)
        reasons[:] = [c.finish_reason for c in completions]
        return DataProto.from_dict(
            batch, {"solution_texts": texts, "finish_reasons": reasons}, {"pad_token_id": pad_token_id(self.tokenizer)}
        )
