"""Generation for workers with a rollout engine, with or without training in the same process."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.config import Config, RolloutConfig, ValidationConfig
from hybridflow.controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridflow.data.tokenizer import pad_token_id
from hybridflow.protocol import DataProto
from hybridflow.rollout import Completion, Request, RolloutEngine, SamplingParams, generate
from hybridflow.runtime import free_device_memory, own_device
from hybridflow.workers.begun_batches import BegunBatches
from hybridflow.workers.measured import MeasuredWorker
from hybridflow.workers.rollout_batch import rollout_batch

ROLLOUT_MESH = "rollout"
"""Name of the mesh of a group's rollout engines: axes for the engines and for the ranks that share an engine."""

TO_ENGINES = make_nd_compute_dataproto_dispatch_fn(ROLLOUT_MESH, name="TO_ENGINES")
"""Dispatch mode that splits prompts over the rollout engines; ranks of one engine get the same, one is collected."""

PROMPT_COLUMNS = ("prompts", "prompt_mask", "group_ids")
DATASET_COLUMNS = (
    *("prompts", "prompt_mask", "raw_prompts", "prompt_texts"),
    *("data_sources", "ground_truths", "extra_infos"),
)
"""The columns of a prompt dataset."""
ROLLOUT_COLUMNS = (
    *("responses", "response_mask", "input_ids", "attention_mask", "position_ids"),
    *("rollout_log_probs", "rollout_versions", "finish_reasons", "solution_texts"),
)


def training_columns(config: Config) -> tuple[str, ...]:
    """Return the columns of prompts that generation for training reads."""
    return (*PROMPT_COLUMNS, *["expected_lengths"] * (config.rollout.schedule == "expected"))


def begun_columns(config: Config) -> tuple[str, ...]:
    """Return the columns of prompts that come back with the responses of a batch that is read in parts."""
    return (*DATASET_COLUMNS, "group_ids", *["expected_lengths"] * (config.rollout.schedule == "expected"))


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
        reads=training_columns,
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

    @register(TO_ENGINES, reads=begun_columns, writes=("group_ids",))
    def begin_sequences(self, prompts: DataProto) -> DataProto:
        """Begin to generate `rollout.group_size` responses for each prompt; return the `group_ids`.

        `next_sequences` and `finish_sequences` return the responses.
        """
        self._begun.begin(_noise_key(prompts), prompts, self._requests(prompts, self.config.rollout))
        return prompts.select(["group_ids"], [])

    @register(
        TO_ENGINES,
        reads=("group_ids",),
        writes=lambda config: (*ROLLOUT_COLUMNS, *begun_columns(config)),
        rows=lambda config: config.rollout.group_size,
    )
    def next_sequences(self, places: DataProto) -> DataProto:
        """Return those prompts that finish next, each with its responses: as many prompts as `places` has rows.

        `places`: any rows of a batch that has begun. The `group_ids` of the result name its prompts.
        """
        prompts, completions = self._begun.next(_noise_key(places), len(places))
        rows = self._rollouts(prompts, completions, self.config.rollout.group_size)
        return prompts.select(meta_info_keys=()).repeat(self.config.rollout.group_size, interleave=True).union(rows)

    @register(Dispatch.ONE_TO_ALL)
    def free_cache_bytes(self) -> int:
        """Return the memory that keys and values may take now, in bytes; 0 on a CPU without rollout.kv_cache_bytes."""
        rollout, device = self.config.rollout, own_device()
        if rollout.kv_cache_bytes or device.type != "cuda":
            return rollout.kv_cache_bytes
        return int(rollout.gpu_memory_utilization * free_device_memory(device))

    @register(
        TO_ENGINES,
        reads=("group_ids",),
        writes=ROLLOUT_COLUMNS,
        rows=lambda config: config.rollout.group_size,
    )
    def finish_sequences(self, begun: DataProto) -> DataProto:
        """Return the responses to all prompts of a batch that has begun, in order.

        `begun`: the result of `begin_sequences`, with the same `meta_info["noise_key"]`.
        """
        prompts, completions = self._begun.rest(_noise_key(begun))
        return self._rollouts(prompts, completions, self.config.rollout.group_size)

    def between_steps(self) -> None:
        """Do what must be done between two steps of begun batches; nothing here."""

    @cached_property
    def _begun(self) -> BegunBatches:
        return BegunBatches(self.rollout, self.ready_to_generate, self.between_steps)

    def _generate(self, prompts: DataProto, settings: RolloutConfig | ValidationConfig) -> DataProto:
        requests = self._requests(prompts, settings)
        with self.ready_to_generate():
            completions = generate(self.rollout, requests)
        return self._rollouts(prompts, completions, settings.group_size)

    def _requests(self, prompts: DataProto, settings: RolloutConfig | ValidationConfig) -> list[Request]:
        sampling = SamplingParams(
            max_new_tokens=self.config.data.max_response_length,
            temperature=settings.temperature,
            top_k=settings.top_k if isinstance(settings, RolloutConfig) else 0,
            top_p=settings.top_p if isinstance(settings, RolloutConfig) else 1.0,
            stop_token_ids=self.stop_ids,
            stop_strings=self.config.rollout.stop_strings,
        )
        noise, columns = _noise_key(prompts), prompts.batch
        expected = columns.get("expected_lengths", torch.zeros(len(prompts)))  # read only for training
        names = ("prompts", "prompt_mask", "group_ids")
        return [
            Request(
                i,
                ids[mask.bool()].tolist(),
                sampling,
                settings.group_size,
                (*noise, int(group)),
                expected_length=float(length),
            )
            for i, (ids, mask, group, length) in enumerate(zip(*(columns[n] for n in names), expected, strict=True))
        ]

    def _rollouts(self, prompts: DataProto, completions: Sequence[Completion], group_size: int) -> DataProto:
        """Return the columns of `ROLLOUT_COLUMNS`, `group_size` rows for each prompt."""
        source = torch.arange(len(prompts)).repeat_interleave(group_size)
        batch = rollout_batch(
            prompts.batch["prompts"][source],
            prompts.batch["prompt_mask"][source],
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


def _noise_key(prompts: DataProto) -> tuple[int, ...]:
    """Return the noise key of a batch, which also names it."""
    return tuple(prompts.meta_info["noise_key"])
