"""Generation for workers with a rollout engine, with or without training in the same process."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hybridflow.config import Config, RolloutConfig, ValidationConfig
from hybridflow.controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridflow.controller.mesh import ROLLOUT_MESH
from hybridflow.data.tokenizer import pad_token_id, response_texts
from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto
from hybridflow.protocol.meta_info import NOISE_KEY
from hybridflow.rollout import Completion, EmbeddedRollout, Request, RolloutEngine, SamplingParams, generate
from hybridflow.rollout.weight_sync.fingerprint import placed_fingerprints
from hybridflow.workers.begun_batches import BegunBatches
from hybridflow.workers.episode_batch import EPISODE_COLUMNS, routes_column
from hybridflow.workers.episodes import EPISODE_PROMPT_COLUMNS, BegunEpisodes, EpisodeWorker, PlayedBatch
from hybridflow.workers.reward import score_columns
from hybridflow.workers.worker_process import DeviceWorker


def rollouts_of(
    prompts: DataProto,
    completions: Sequence[Completion],
    group_size: int,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
    dtype: torch.dtype = torch.float32,
    routes_shape: tuple[int, int] = (0, 0),
) -> DataProto:
    """Return the columns of `ROLLOUT_COLUMNS`, `group_size` rows for each prompt; see `rollout_batch`.

    And the column `routes`, if `routes_shape` is that of an engine that records them.
    """
    source = torch.arange(len(prompts)).repeat_interleave(group_size)
    padding = pad_token_id(tokenizer)
    batch = rollout_batch(
        prompts.batch["prompts"][source], prompts.batch["prompt_mask"][source], completions, padding, dtype
    )
    if any(routes_shape):
        routes = [completion.routes for completion in completions]
        mask = prompts.batch["prompt_mask"][source]
        batch["routes"] = routes_column(routes, mask, batch["responses"].shape[1], routes_shape)
    texts = response_texts(tokenizer, [c.token_ids for c in completions], stop_ids)
    reasons = [c.finish_reason for c in completions]
    return DataProto.from_dict(batch, {"solution_texts": texts, "finish_reasons": reasons}, {"pad_token_id": padding})


def rollout_batch(
    prompts: Tensor,
    prompt_mask: Tensor,
    completions: Sequence[Completion],
    pad_token_id: int,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return the tensor columns of `ROLLOUT_COLUMNS`, one row for each completion.

    prompts, prompt_mask: (batch, prompt_len), one row for each completion. `dtype`: dtype of the log-probs. Raises
    BatchError if there is no completion, or if prompts and completions differ in number.
    """
    if not completions or len(completions) != len(prompts):
        raise BatchError(
            f"got {len(completions)} completions for {len(prompts)} prompt rows; pass one prompt row for each "
            "completion, at least one."
        )

    def pad(values: list[list[int]] | list[list[float]], fill: float, dtype: torch.dtype) -> Tensor:
        rows = [torch.tensor(row, dtype=dtype) for row in values]
        return pad_sequence(rows, batch_first=True, padding_value=fill)

    responses = pad([c.token_ids for c in completions], pad_token_id, torch.int64)
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    response_mask = torch.arange(responses.shape[1]) < lengths[:, None]
    attention_mask = torch.cat([prompt_mask.to(torch.int64), response_mask.to(torch.int64)], dim=-1)
    return {
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts, responses], dim=-1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "rollout_log_probs": pad([c.log_probs for c in completions], 0.0, dtype),
        "rollout_versions": pad([c.versions for c in completions], -1, torch.int64),
    }


TO_ENGINES = make_nd_compute_dataproto_dispatch_fn(ROLLOUT_MESH, name="TO_ENGINES")
"""Dispatch mode that splits prompts over the rollout engines; ranks of one engine get the same, one is collected."""

PROMPT_COLUMNS = ("prompts", "prompt_mask", "group_ids")
DATASET_COLUMNS = (
    *("prompts", "prompt_mask", "raw_prompts", "prompt_texts"),
    *("data_sources", "ground_truths", "extra_infos"),
)
"""The columns of a prompt dataset."""
BEGUN_COLUMNS = (*DATASET_COLUMNS, "group_ids")
"""The columns of prompts that begin; they come back with the responses of a part of a batch."""
ROLLOUT_COLUMNS = (
    *("responses", "response_mask", "input_ids", "attention_mask", "position_ids"),
    *("rollout_log_probs", "rollout_versions", "finish_reasons", "solution_texts"),
)


def prompt_columns(config: Config) -> tuple[str, ...]:
    """Return the columns of prompts that generation reads; environments make prompts of their own."""
    return ("group_ids", *EPISODE_PROMPT_COLUMNS) if config.environment.classes else PROMPT_COLUMNS


def rollout_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that generation writes; environments also give the rewards."""
    of_episodes = (*EPISODE_COLUMNS, *score_columns(config)) if config.environment.classes else ()
    return (*ROLLOUT_COLUMNS, *of_episodes)


def trained_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that generation writes for training."""
    return (*rollout_columns(config), "routes") if config.replays_routes else rollout_columns(config)


def part_columns(config: Config) -> tuple[str, ...]:
    """Return the columns of a part of a batch: those of its prompts and those that generation writes."""
    return tuple(dict.fromkeys((*trained_columns(config), *BEGUN_COLUMNS)))


GREEDY = ValidationConfig(temperature=0.0, group_size=1)


class GeneratingWorker(DeviceWorker):
    """A base class of workers that generate with the engine `rollout`, inside `ready_to_generate()`.

    A batch is generated in one call, or it begins, beside others or not, and is read in parts or as a whole.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    rollout: RolloutEngine
    episodes: EpisodeWorker | None = None
    """Plays episodes, if the configuration has environments."""

    def ready_to_generate(self) -> AbstractContextManager[None]:
        """Return a context in which the rollout engine has its weights and memory."""
        raise NotImplementedError

    def close(self) -> None:
        """Close an engine of vLLM, whose memory the process would keep."""
        if close := getattr(self.rollout, "close", None):
            close()

    @register(
        TO_ENGINES,
        reads=prompt_columns,
        writes=trained_columns,
        rows=lambda config: config.rollout.group_size * config.rows_per_episode,
        parts=lambda config: config.controller.parts,
    )
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate `rollout.group_size` responses for each prompt, in order."""
        return self._generate(prompts, self.config.rollout, step=noise_key(prompts)[-1])

    @register(TO_ENGINES, reads=prompt_columns, writes=rollout_columns, rows=lambda config: config.rows_per_episode)
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

    @register(TO_ENGINES, reads=BEGUN_COLUMNS, writes=("group_ids",))
    def begin_sequences(self, prompts: DataProto) -> DataProto:
        """Begin to generate `rollout.group_size` responses for each prompt; return the `group_ids`.

        `next_sequences` and `finish_sequences` return the responses.
        """
        if self.episodes:
            start = partial(self._started_episodes, self.episodes, prompts)
            self._begun_episodes.begin(noise_key(prompts), prompts, start)
        else:
            self._begun.begin(noise_key(prompts), prompts, self.requests_of(prompts, self.config.rollout))
        return prompts.select(["group_ids"], [])

    @register(
        TO_ENGINES,
        reads=("group_ids",),
        writes=part_columns,
        rows=lambda config: config.rollout.group_size * config.rows_per_episode,
    )
    def next_sequences(self, places: DataProto) -> DataProto:
        """Return those prompts that finish next, each with its responses: as many prompts as `places` has rows.

        `places`: any rows of a batch that has begun. The `group_ids` of the result name its prompts.
        """
        size, key = self.config.rollout.group_size, noise_key(places)
        with self.generating():
            if self.episodes:
                prompts, rows = self._begun_episodes.next(key, len(places))
            else:
                prompts, completions = self._begun.next(key, len(places))
                rows = self.rollouts_of(prompts, completions, size)
        own = {*rows.batch.keys(), *rows.non_tensor_batch}  # episodes have prompts of their own
        tensors, others = (sorted({*part} - own) for part in (prompts.batch.keys(), prompts.non_tensor_batch))
        times = size * self.config.rows_per_episode
        return prompts.select(tensors, others, ()).repeat(times, interleave=True).union(rows)

    @register(
        TO_ENGINES,
        reads=("group_ids",),
        writes=trained_columns,
        rows=lambda config: config.rollout.group_size * config.rows_per_episode,
    )
    def finish_sequences(self, begun: DataProto) -> DataProto:
        """Return the responses to all prompts of a batch that has begun, in order.

        `begun`: the result of `begin_sequences`, with the same `meta_info[NOISE_KEY]`.
        """
        with self.generating():
            if self.episodes:
                return self._begun_episodes.rest(noise_key(begun))[1]
            prompts, completions = self._begun.rest(noise_key(begun))
        return self.rollouts_of(prompts, completions, self.config.rollout.group_size)

    @register(Dispatch.ONE_TO_ALL)
    def generating_weights(self) -> dict[str, tuple[int, int]] | None:
        """Return fingerprint and address of each weight that the embedded engine generates with; None for vLLM."""
        if not isinstance(self.rollout, EmbeddedRollout):
            return None
        with self.ready_to_generate():
            return placed_fingerprints(self.rollout.model.named_parameters())

    @register(Dispatch.ONE_TO_ALL)
    def abandon_step(self) -> None:
        """Discard what an unfinished step has left: batches that have begun, and a weight sync."""
        self._begun.abandon()
        self._begun_episodes.abandon()
        self.rollout.abandon_loading()
        super().abandon_step()

    def generating(self) -> AbstractContextManager[None]:
        """Return a context in which begun batches take steps; it does nothing here."""
        return nullcontext()

    def between_steps(self) -> None:
        """Do what must be done between two steps of begun batches; nothing here."""

    def _generate(
        self, prompts: DataProto, settings: RolloutConfig | ValidationConfig, step: int | None = None
    ) -> DataProto:
        if self.episodes:
            with self.ready_to_generate():
                sampling = self._sampling(settings)
                return self.episodes.start(self.rollout, prompts, sampling, settings.group_size, step).rest()[1]
        requests = self.requests_of(prompts, settings)
        with self.ready_to_generate():
            completions = generate(self.rollout, requests)
        return self.rollouts_of(prompts, completions, settings.group_size, trains=step is not None)

    def _started_episodes(self, episodes: EpisodeWorker, prompts: DataProto) -> PlayedBatch:
        settings, step = self.config.rollout, noise_key(prompts)[-1]
        sampling = self._sampling(settings)
        return episodes.start(self.rollout, prompts, sampling, settings.group_size, step, self.between_steps)

    @cached_property
    def _begun_episodes(self) -> BegunEpisodes:
        return BegunEpisodes(self.ready_to_generate)

    @cached_property
    def _begun(self) -> BegunBatches:
        return BegunBatches(self.rollout, self.ready_to_generate, self.between_steps)

    def requests_of(self, prompts: DataProto, settings: RolloutConfig | ValidationConfig) -> list[Request]:
        """Return the request for each prompt."""
        sampling, noise, columns = self._sampling(settings), noise_key(prompts), prompts.batch
        names, size = ("prompts", "prompt_mask", "group_ids"), settings.group_size
        return [
            Request(i, ids[mask.bool()].tolist(), sampling, size, (*noise, int(group)))
            for i, (ids, mask, group) in enumerate(zip(*(columns[name] for name in names), strict=True))
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

    def rollouts_of(
        self, prompts: DataProto, completions: Sequence[Completion], group_size: int, *, trains: bool = True
    ) -> DataProto:
        """Return the columns of `ROLLOUT_COLUMNS`, and routes if it `trains`, `group_size` rows for each prompt."""
        dtype = torch.float64 if self.config.model.dtype == "float64" else torch.float32
        routes_shape = self.rollout.routes_shape if trains else (0, 0)
        return rollouts_of(prompts, completions, group_size, self.tokenizer, self.stop_ids, dtype, routes_shape)


def noise_key(prompts: DataProto) -> tuple[int, ...]:
    """Return the noise key of a batch, which also names it."""
    return tuple(prompts.meta_info[NOISE_KEY])
