"""The hybrid worker: the policy that learns and the engine that generates with its weights, in one process."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hybridflow.config import Config, RolloutConfig, ValidationConfig
from hybridflow.controller import Dispatch, register
from hybridflow.data import load_tokenizer, stop_token_ids
from hybridflow.data.tokenizer import pad_token_id
from hybridflow.protocol import DataProto
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.workers.losses import actor_columns, actor_loss
from hybridflow.workers.mini_batches import iterate_mini_batches, mean_metrics
from hybridflow.workers.model_worker import MODEL_COLUMNS, TO_REPLICAS, ModelWorker
from hybridflow.workers.rollout_batch import rollout_batch

PROMPT_COLUMNS = ("prompts", "prompt_mask", "group_ids")
ROLLOUT_COLUMNS = (
    *("responses", "response_mask", "input_ids", "attention_mask", "position_ids"),
    *("rollout_log_probs", "rollout_versions", "finish_reasons", "solution_texts"),
)


class ActorRolloutWorker(ModelWorker):
    """Generates, computes log-probs of what was generated, and learns from it."""

    component = "actor"
    role = "actor_rollout"

    def __init__(self, config: Config, total_updates: int = 1) -> None:
        self.prepare_process(config)
        self.config = config
        self.tokenizer = load_tokenizer(config.model.path)
        self.stop_ids = stop_token_ids(self.tokenizer, config.model.path)
        self.engine = self.build_engine(config, config.model.path, "policy", config.actor.optimizer, total_updates)
        self.rollout = EmbeddedRollout(
            self.engine.rollout_model(),
            max_running_sequences=config.rollout.max_running_sequences,
            pack_weights=config.rollout.pack_weights,
            shares_model=self.engine.shares_weights,
        )
        self._sync_weights()

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=PROMPT_COLUMNS,
        writes=ROLLOUT_COLUMNS,
        rows=lambda config: config.rollout.group_size,
        parts=lambda config: config.controller.parts,
    )
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """`rollout.group_size` responses for each prompt, in order."""
        return self._generate(prompts, self.config.rollout)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=PROMPT_COLUMNS,
        writes=ROLLOUT_COLUMNS,
        rows=lambda config: config.validation.group_size,
    )
    def generate_validation_sequences(self, prompts: DataProto) -> DataProto:
        """`validation.group_size` responses for each prompt, in order."""
        return self._generate(prompts, self.config.validation)

    @register(
        TO_REPLICAS,
        reads=MODEL_COLUMNS,
        writes=("old_log_probs", "entropies"),
        parts=lambda config: config.controller.parts,
    )
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Log-probs of the responses under the policy before the update, and its entropies."""
        outputs = self.engine.forward(batch, with_entropy=True, temperature=self.config.rollout.temperature)
        return DataProto.from_dict({"old_log_probs": outputs["log_probs"], "entropies": outputs["entropies"]})

    @register(
        TO_REPLICAS,
        reads=MODEL_COLUMNS,
        writes=("ref_log_probs",),
        parts=lambda config: config.controller.parts,
    )
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        """Log-probs of the responses under the model that the adapters started from (lora.rank)."""
        with self.engine.without_adapters():
            outputs = self.engine.forward(batch, temperature=self.config.rollout.temperature)
        return DataProto.from_dict({"ref_log_probs": outputs["log_probs"]})

    @register(
        TO_REPLICAS,
        reads=("response_mask", "row_ids", "old_log_probs", "entropies", "rollout_log_probs"),
        writes=("num_tokens", "entropy_sum", "drift_sum"),
        rows="one",
    )
    def sum_log_prob_metrics(self, batch: DataProto) -> DataProto:
        """One row for this rank's tokens: their number, the sum of entropies, and of |old - rollout log-prob|."""
        columns = batch.batch
        mask = columns["response_mask"].bool() & (columns["row_ids"] >= 0)[:, None]
        drift = (columns["old_log_probs"] - columns["rollout_log_probs"]).abs()
        sums = {
            "num_tokens": mask.sum(),
            "entropy_sum": columns["entropies"][mask].double().sum(),
            "drift_sum": drift[mask].double().sum(),
        }
        return DataProto.from_dict({name: total[None] for name, total in sums.items()})

    @register(
        TO_REPLICAS,
        reads=lambda config: tuple(sorted({*MODEL_COLUMNS, "row_ids", *actor_columns(config)})),
        writes=(),
        rows="one",
    )
    def update_actor(self, batch: DataProto) -> DataProto:
        """One optimizer step for each mini-batch; `meta_info["kl_coef"]` weighs the KL in the loss."""
        self.require_collectives("sum gradients")
        with self.engine.present():
            metrics = self._update_actor(batch)
        return DataProto(meta_info={"metrics": metrics})

    def _update_actor(self, batch: DataProto) -> dict[str, float]:
        steps = []
        for mini_batch in iterate_mini_batches(batch, self.engine):
            loss = actor_loss(self.config, batch.meta_info["kl_coef"], mini_batch.num_tokens, mini_batch.num_sequences)
            result = self.engine.update(
                mini_batch.rows, loss, with_entropy=True, temperature=self.config.rollout.temperature
            )
            steps.append(
                {
                    "actor/loss": result.loss,
                    "actor/grad_norm": result.grad_norm,
                    "actor/lr": result.lr,
                    "actor/padding_computed": result.padding_share,
                    "actor/shared_prompts": result.saved_share,
                    **result.metrics,
                }
            )
        self._sync_weights()
        return mean_metrics(steps)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, directory: str) -> None:
        super().load(directory)
        self._sync_weights()

    def _sync_weights(self) -> None:
        """The rollout engine generates with the weights after so many updates; where they are sharded, it has them
        whole while it generates."""
        if self.engine.shares_weights:
            load_weights(self.rollout, self.engine.weights(), version=self.engine.num_updates)

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        if self.engine.shares_weights:
            with self.engine.present():  # they are the rollout engine's own
                yield
            return
        load_weights(self.rollout, self.engine.weights(), version=self.engine.num_updates)
        try:
            yield
        finally:
            self.rollout.sleep()

    def _generate(self, prompts: DataProto, how: RolloutConfig | ValidationConfig) -> DataProto:
        sampling = SamplingParams(
            max_new_tokens=self.config.data.max_response_length,
            temperature=how.temperature,
            top_k=how.top_k if isinstance(how, RolloutConfig) else 0,
            top_p=how.top_p if isinstance(how, RolloutConfig) else 1.0,
            stop_token_ids=self.stop_ids,
        )
        noise = tuple(prompts.meta_info["noise_key"])
        columns = prompts.batch
        requests = [
            Request(i, ids[mask].tolist(), sampling, how.group_size, (*noise, int(group)))
            for i, (ids, mask, group) in enumerate(
                zip(columns["prompts"], columns["prompt_mask"].bool(), columns["group_ids"], strict=True)
            )
        ]
        with self._whole_weights():
            completions = generate(self.rollout, requests)
        source = torch.arange(len(prompts)).repeat_interleave(how.group_size)
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
