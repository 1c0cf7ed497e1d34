"""The policy that learns: log-probs of what was generated, updates, and its weights for those who generate."""

from collections.abc import Iterator
from typing import Any

import torch

from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.data import load_tokenizer, stop_token_ids
from hybridflow.protocol import DataProto
from hybridflow.weight_sync import Bucket, Probe, Sent, WeightSpec, fill_buckets, plan_buckets, probe_sequences
from hybridflow.workers.algorithm_functions import reads_column
from hybridflow.workers.drift import KL, MEAN, SHARE, drift_of_tokens
from hybridflow.workers.losses import actor_columns, actor_loss
from hybridflow.workers.mini_batches import iterate_mini_batches, mean_metrics
from hybridflow.workers.model_worker import MODEL_COLUMNS, TO_REPLICAS, ModelWorker
from hybridflow.workers.process import prepare_process
from hybridflow.workers.selection import with_selected_tokens
from hybridflow.workers.weight_ways import Offer, SendingEnd


class ActorWorker(ModelWorker):
    """Computes log-probs of what was generated, and learns from it. It generates nothing."""

    component = "actor"
    role = "actor_rollout"
    _end: SendingEnd | None = None
    _buckets: Iterator[Bucket] | None = None

    def __init__(self, config: Config, total_updates: int = 1) -> None:
        prepare_process(self, config)
        self.config = config
        self.tokenizer = load_tokenizer(config.model.path)
        self.stop_ids = stop_token_ids(self.tokenizer, config.model.path)
        self.engine = self.build_engine(config, config.model.path, "policy", config.actor.optimizer, total_updates)

    @register(
        TO_REPLICAS,
        reads=MODEL_COLUMNS,
        writes=lambda config: (
            *("old_log_probs", "entropies"),
            *["sum_squared_probs"] * reads_column(config, "sum_squared_probs"),
        ),
        parts=lambda config: config.controller.parts,
    )
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Log-probs of the responses under the policy before the update, and its entropies."""
        outputs = self.engine.forward(
            batch,
            with_entropy=True,
            with_sum_squared_probs=reads_column(self.config, "sum_squared_probs"),
            temperature=self.config.rollout.temperature,
        )
        outputs["old_log_probs"] = outputs.pop("log_probs")
        return DataProto.from_dict(outputs)

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
        writes=("num_tokens", "entropy_sum", "drift_sum", "drift_max", "drift_kl_sum", "drift_share_sum"),
        rows="one",
    )
    def sum_log_prob_metrics(self, batch: DataProto) -> DataProto:
        """One row for this rank's tokens: their number, the sum of entropies, and how far old log-probs are from the
        rollout's."""
        columns = batch.batch
        mask = columns["response_mask"].bool() & (columns["row_ids"] >= 0)[:, None]
        drift = {
            name: torch.where(mask, values, 0).double()
            for name, values in drift_of_tokens(columns["old_log_probs"], columns["rollout_log_probs"]).items()
        }
        sums = {
            "num_tokens": mask.sum(),
            "entropy_sum": columns["entropies"][mask].double().sum(),
            "drift_sum": drift[MEAN].sum(),
            "drift_max": drift[MEAN].max(),
            "drift_kl_sum": drift[KL].sum(),
            "drift_share_sum": drift[SHARE].sum(),
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
        for number, mini_batch in enumerate(iterate_mini_batches(batch, self.engine)):
            rows = with_selected_tokens(self.config, self.engine, mini_batch.rows, batch.meta_info, number)
            loss = actor_loss(self.config, batch.meta_info["kl_coef"], mini_batch.num_tokens, mini_batch.num_sequences)
            result = self.engine.update(rows, loss, with_entropy=True, temperature=self.config.rollout.temperature)
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
        return mean_metrics(steps)

    # ------------------------------------------------------------------------------------------ weights

    @register(Dispatch.ONE_TO_ALL)
    def offer_weights(self, num_receivers: int) -> Offer:
        """What `send_bucket` will send, of the present version, to so many ranks of another pool."""
        self._end = self._end or SendingEnd(self.config, self.rank, num_receivers)
        self._buckets = None
        specs = self.weight_specs()
        return Offer(specs, len(self._plan(specs)), self.engine.num_updates, self._end.address, self._end.port)

    @register(Dispatch.ONE_TO_ALL)
    def join_receivers(self) -> None:
        """Meet those who receive, once."""
        assert self._end is not None, "offer_weights comes first"
        self._end.join()

    @register(Dispatch.ONE_TO_ALL)
    def send_bucket(self) -> tuple[Sent, Any] | None:
        """Send the next bucket; rank 0 says what the receivers need, the others only gather with it."""
        assert self._end is not None, "offer_weights comes first"
        self._buckets = self._buckets or self.gathered_buckets()
        bucket = next(self._buckets)
        return self._end.send(bucket).apart() if self.rank == 0 else None

    @register(Dispatch.ONE_TO_ALL)
    def finish_sending(self) -> None:
        """Clear away what was sent."""
        assert self._end is not None, "offer_weights comes first"
        self._buckets = None
        self._end.finish()

    @register(Dispatch.ONE_TO_ALL)
    def compute_probe(self) -> Probe:
        """What a rollout engine with these weights must compute."""
        sequences = probe_sequences(self.engine.model.config.get_text_config().vocab_size, self._max_len() - 1)
        ids = torch.tensor(sequences)
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": ids[:, 1:] >= 0}
        return Probe(sequences, self.engine.forward(DataProto.from_dict(columns))["log_probs"].tolist())

    def weight_specs(self) -> list[WeightSpec]:
        """The weights that generation needs, as they are sent."""
        dtype = self.config.model.dtype
        return [WeightSpec(name, tuple(shape), dtype) for name, shape in self.engine.weight_shapes().items()]

    def gathered_buckets(self) -> Iterator[Bucket]:
        """All weights, some at a time; every rank gathers, and rank 0 makes fingerprints."""
        return fill_buckets(self._plan(self.weight_specs()), self.engine.weights(), self.engine.num_updates)

    def _plan(self, specs: list[WeightSpec]) -> list[list[WeightSpec]]:
        return plan_buckets(specs, self.config.rollout.sync_bucket_bytes)

    def _max_len(self) -> int:
        """Of prompt and response together, for which the model's positions are enough."""
        return self.config.data.max_prompt_length + self.config.data.max_response_length
