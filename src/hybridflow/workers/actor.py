"""The trained policy: log-probs of responses, updates, and weight sync to rollout engines."""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch

from hybridflow.algorithms import covariances
from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.data.tokenizer import stop_token_ids, tokenizer_of
from hybridflow.engines import LossFunction, TrainEngine
from hybridflow.protocol import DataProto
from hybridflow.rollout.weight_sync.fingerprint import placed_fingerprints
from hybridflow.rollout.weight_sync.sender import SendsWeights, WeightSender, boxes_of_sender
from hybridflow.rollout.weight_sync.transports import build_sending_transport
from hybridflow.runtime.random_streams import derive_seed
from hybridflow.workers.algorithm_functions import reads_column, token_selection
from hybridflow.workers.exact_samples import exactly, require_exact, samples_exactly
from hybridflow.workers.log_prob_mismatch import KL, MEAN, SHARE, log_prob_mismatch_of
from hybridflow.workers.losses import actor_columns, actor_loss
from hybridflow.workers.model_worker import MODEL_COLUMNS, ModelWorker, on_replicas
from hybridflow.workers.streamed_update import StreamedUpdate
from hybridflow.workers.updates import MiniBatch, run_updates
from hybridflow.workers.worker_process import prepare_worker_process


def with_selected_tokens(
    config: Config, engine: TrainEngine, rows: DataProto, meta_info: Mapping[str, Any], number: int
) -> DataProto:
    """Add the column `selected_tokens` to this rank's rows of a mini-batch, if the policy loss selects tokens.

    Every rank sees the covariances of all tokens, sorted by row and position, so that the selection is the same on any
    number of ranks. `meta_info["seed_keys"]` and the `number` of the optimizer step seed random selections.
    """
    select = token_selection(config)
    if select is None:
        return rows
    columns = rows.batch
    mask = columns["response_mask"].bool()
    log_probs = engine.forward(rows, temperature=config.rollout.temperature)["log_probs"]
    row, position = mask.nonzero(as_tuple=True)
    own = (
        columns["row_ids"][row] * config.data.max_response_length + position,  # widths may differ between ranks
        log_probs[mask],
        columns["advantages"].expand(mask.shape)[mask],
    )
    keys, of_log_probs, of_advantages = (torch.cat(parts) for parts in zip(*engine.gather(own), strict=True))
    order = keys.argsort()
    chosen = torch.zeros(len(keys), dtype=torch.bool)
    if len(keys):
        of_tokens = covariances(of_log_probs[order], of_advantages[order])
        chosen = select(covariances=of_tokens, seed=derive_seed(*meta_info["seed_keys"], number))
    selected = torch.zeros_like(mask)
    selected[mask] = torch.isin(own[0], keys[order][chosen])
    return rows.union(DataProto.from_dict({"selected_tokens": selected}))


def log_prob_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that `compute_log_probs` writes."""
    columns = ("old_log_probs", "entropies")
    return (*columns, "sum_squared_probs") if reads_column(config, "sum_squared_probs") else columns


def replayed_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that the policy reads to compute log-probs: with routes, which it replays."""
    return (*MODEL_COLUMNS, "routes") if config.replays_routes else MODEL_COLUMNS


class ActorWorker(SendsWeights, ModelWorker):
    """A worker that computes log-probs of responses and trains the policy on them. It does not generate."""

    component = "actor"
    role = "actor_rollout"

    def __init__(self, config: Config, total_updates: int = 1) -> None:
        config = prepare_worker_process(self, config)
        self.config = config
        self.tokenizer = tokenizer_of(config)
        self.stop_ids = stop_token_ids(self.tokenizer, config.model.path, config.data.chat_template)
        self.prepare()
        self.engine = self.build_engine(config, config.model.path, "policy", config.actor.optimizer, total_updates)
        sends = self.rank == 0
        transport = partial(build_sending_transport, config) if sends else None
        boxes = boxes_of_sender(self.engine.weight_shapes(), sends=sends)
        self.weight_sender = WeightSender(self.engine, config, transport, boxes)

    def prepare(self) -> None:
        """Build what needs no weights, before they are loaded; nothing here."""

    @on_replicas(reads=replayed_columns, writes=log_prob_columns)
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Compute log-probs of the responses and entropies under the policy before the update."""
        outputs = self.engine.forward(
            batch,
            with_entropy=True,
            with_sum_squared_probs=reads_column(self.config, "sum_squared_probs"),
            temperature=self.config.rollout.temperature,
        )
        outputs["old_log_probs"] = outputs.pop("log_probs")
        outputs.pop("routes_changed", None)
        return DataProto.from_dict(outputs)

    @on_replicas(reads=MODEL_COLUMNS, writes=("ref_log_probs",))
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        """Compute log-probs of the responses under the base model, without its adapters (lora.rank)."""
        with self.engine.without_adapters():
            outputs = self.engine.forward(batch, temperature=self.config.rollout.temperature)
        return DataProto.from_dict({"ref_log_probs": outputs["log_probs"]})

    @on_replicas(
        reads=("response_mask", "row_ids", "old_log_probs", "entropies", "rollout_log_probs"),
        writes=("num_tokens", "entropy_sum", "mismatch_sum", "mismatch_max", "mismatch_kl_sum", "mismatch_share_sum"),
        rows="one",
    )
    def sum_log_prob_metrics(self, batch: DataProto) -> DataProto:
        """Return one row of sums over this rank's tokens: their number, entropies, and log-prob mismatch."""
        columns = batch.batch
        mask = columns["response_mask"].bool() & (columns["row_ids"] >= 0)[:, None]
        if samples_exactly(self.config):
            require_exact(batch, columns["old_log_probs"])
        mismatch = {
            name: torch.where(mask, values, 0).double()
            for name, values in log_prob_mismatch_of(columns["old_log_probs"], columns["rollout_log_probs"]).items()
        }
        sums = {
            "num_tokens": mask.sum(),
            "entropy_sum": columns["entropies"][mask].double().sum(),
            "mismatch_sum": mismatch[MEAN].sum(),
            "mismatch_max": mismatch[MEAN].max(),
            "mismatch_kl_sum": mismatch[KL].sum(),
            "mismatch_share_sum": mismatch[SHARE].sum(),
        }
        return DataProto.from_dict({name: total[None] for name, total in sums.items()})

    @on_replicas(
        reads=lambda config: tuple(sorted({*replayed_columns(config), "row_ids", *actor_columns(config)})),
        writes=(),
        rows="one",
    )
    def update_actor(self, batch: DataProto) -> DataProto:
        """Run one optimizer step for each mini-batch; `meta_info["kl_coef"]` is the weight of the KL in the loss."""
        self.require_collectives("sum gradients")
        config, engine, meta_info = self.config, self.engine, batch.meta_info

        def loss_of(step: MiniBatch) -> LossFunction:
            loss = actor_loss(config, meta_info["kl_coef"], step.num_tokens, step.num_sequences)
            return exactly(loss) if samples_exactly(config) and step.number == 0 else loss

        return run_updates(
            engine,
            batch,
            loss_of,
            "actor",
            rows_of=lambda step: with_selected_tokens(config, engine, step.rows, meta_info, step.number),
            with_entropy=True,
            temperature=config.rollout.temperature,
        )

    @on_replicas(
        reads=lambda config: tuple(sorted({*replayed_columns(config), "row_ids", *actor_columns(config)})),
        writes=(),
        rows="one",
    )
    def update_actor_in_parts(self, part: DataProto) -> DataProto:
        """Add the gradients of a part of a batch, and make one optimizer step after its last part.

        `meta_info["part"]`: number of the part, number of parts, rows of the batch; `meta_info["kl_coef"]` as in
        `update_actor`.
        """
        self.require_collectives("sum gradients")
        return self._streamed.add(part)

    @cached_property
    def _streamed(self) -> StreamedUpdate:
        return StreamedUpdate(self.config, self.engine)

    @register(Dispatch.ONE_TO_ALL)
    def trained_weights(self) -> dict[str, tuple[int, int]]:
        """Return fingerprint and address of each weight as it is sent to rollout engines."""
        return placed_fingerprints(self.engine.weights())

    @register(Dispatch.ONE_TO_ALL)
    def abandon_step(self) -> None:
        """Discard what an unfinished step has left, a weight sync too."""
        super().abandon_step()
        self.weight_sender.abandon()
