"""Generation for workers with a rollout engine, with or without training in the same process."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.config import Config, RolloutConfig, ValidationConfig
from hybridflow.controller import make_nd_compute_dataproto_dispatch_fn, register
from hybridflow.protocol import DataProto
from hybridflow.rollout import Completion, Request, RolloutEngine, SamplingParams, generate
from hybridflow.workers.episode_batch import EPISODE_COLUMNS
from hybridflow.workers.episodes import EPISODE_PROMPT_COLUMNS, EpisodeWorker
from hybridflow.workers.measured import MeasuredWorker
from hybridflow.workers.reward import score_columns
from hybridflow.workers.rollout_batch import rollouts_of

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


def prompt_columns(config: Config) -> tuple[str, ...]:
    """Return the columns of prompts that generation reads; environments make prompts of their own."""
    return ("group_ids", *EPISODE_PROMPT_COLUMNS) if config.environment.classes else PROMPT_COLUMNS


def training_columns(config: Config) -> tuple[str, ...]:
    """Return the columns of prompts that generation for training reads."""
    return (*prompt_columns(config), *["expected_lengths"] * (config.rollout.schedule == "expected"))


def rollout_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that generation writes; environments also give the rewards."""
    of_episodes = (*EPISODE_COLUMNS, *score_columns(config)) if config.environment.classes else ()
    return (*ROLLOUT_COLUMNS, *of_episodes)


GREEDY = ValidationConfig(temperature=0.0, group_size=1)


class GeneratingWorker(MeasuredWorker):
    """A base class of workers that generate with the engine `rollout`, inside `ready_to_generate()`."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    rollout: RolloutEngine
    episodes: EpisodeWorker | None = None
    """Plays episodes, if the configuration has environments."""

    def ready_to_generate(self) -> AbstractContextManager[None]:
        """Return a context in which the rollout engine has its weights and memory."""
        raise NotImplementedError

    @register(
        TO_ENGINES,
        reads=training_columns,
        writes=rollout_columns,
        rows=lambda config: config.rollout.group_size * config.rows_per_episode,
        parts=lambda config: config.controller.parts,
    )
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate `rollout.group_size` responses for each prompt, in order."""
        return self._generate(prompts, self.config.rollout, step=noise_key(prompts)[-1])

    @register(TO_ENGINES, reads=PROMPT_COLUMNS, writes=ROLLOUT_COLUMNS)
    def generate_greedy_sequences(self, prompts: DataProto) -> DataProto:
        """Generate one response for each prompt by greedy decoding, in order."""
        return self._generate(prompts, GREEDY)

    @register(
        TO_ENGINES,
        reads=prompt_columns,
        writes=rollout_columns,
        rows=lambda config: config.validation.group_size * config.rows_per_episode,
    )
    def generate_validation_sequences(self, prompts: DataProto) -> DataProto:
        """Generate `validation.group_size` responses for each prompt, in order."""
        return self._generate(prompts, self.config.validation)

    def _generate(
        self, prompts: DataProto, settings: RolloutConfig | ValidationConfig, step: int | None = None
    ) -> DataProto:
        if self.episodes:
            with self.ready_to_generate():
                return self.episodes.play(self.rollout, prompts, self._sampling(settings), settings.group_size, step)
        requests = self.requests_of(prompts, settings)
        with self.ready_to_generate():
            completions = generate(self.rollout, requests)
        return self.rollouts_of(prompts, completions, settings.group_size)

    def requests_of(self, prompts: DataProto, settings: RolloutConfig | ValidationConfig) -> list[Request]:
        """Return the request for each prompt."""
        sampling, noise, columns = self._sampling(settings), noise_key(prompts), prompts.batch
        expected = columns.get("expected_lengths", torch.zeros(len(prompts)))  # read only for training
        names, size = ("prompts", "prompt_mask", "group_ids"), settings.group_size
        return [
            Request(i, ids[mask.bool()].tolist(), sampling, size, (*noise, int(group)), expected_length=float(length))
            for i, (ids, mask, group, length) in enumerate(zip(*(columns[n] for n in names), expected, strict=True))
        ]

    def _sampling(self, settings: RolloutConfig | ValidationConfig) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.config.data.max_response_length,
            temperature=settings.temperature,
            top_k=settings.top_k if isinstance(settings, RolloutConfig) else 0,
            top_p=settings.top_p if isinstance(settings, RolloutConfig) else 1.0,
            stop_token_ids=self.stop_ids,
            stop_strings=self.config.rollout.stop_strings,
        )

    def rollouts_of(self, prompts: DataProto, completions: Sequence[Completion], group_size: int) -> DataProto:
        """Return the columns of `ROLLOUT_COLUMNS`, `group_size` rows for each prompt."""
        exact = self.config.model.dtype == "float64"
        return rollouts_of(prompts, completions, group_size, self.tokenizer, torch.float64 if exact else torch.float32)


def noise_key(prompts: DataProto) -> tuple[int, ...]:
    """Return the noise key of a batch, which also names it."""
    return tuple(prompts.meta_info["noise_key"])
