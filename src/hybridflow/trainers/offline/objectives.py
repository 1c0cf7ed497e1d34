"""The objectives of offline training: SFT, DPO and reward models. One optimizer step for each batch.

examples ──────────────────────────────────────────────> update          (SFT)
pairs ──log-probs, reference──> pair losses ──slopes──> update           (DPO, IPO)
pairs ──scores────────────────> pair losses ──slopes──> update           (reward model)
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridflow.algorithms import PREFERENCE_LOSSES, PairLoss, bradley_terry_loss, slopes_of
from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.runtime.observe import DPO_FIGURES, REWARD_MODEL_FIGURES, SFT_FIGURES, reduce_lists
from hybridflow.trainers.read_columns import Batch, read
from hybridflow.trainers.stages import with_row_ids


class Objective(Protocol):
    """The interface of an objective for the offline trainer."""

    @property
    def figures(self) -> Mapping[str, str]:
        """The figures on the console: label -> metric."""
        ...

    def step(self, examples: DataProto) -> tuple[Batch, dict[str, Any]]:
        """Make one optimizer step; return the batch with its new columns, and metrics."""
        ...

    def measure(self, examples: DataProto) -> tuple[dict[str, float], int]:
        """Return sums of validation metrics and the count to divide them by, without training."""
        ...


class SFT:
    """Supervised fine-tuning: the mean cross-entropy of response tokens."""

    figures = SFT_FIGURES

    def __init__(self, policy: WorkerGroup) -> None:
        self.policy = policy

    def step(self, examples: DataProto) -> tuple[Batch, dict[str, Any]]:
        """Make one optimizer step on the examples."""
        batch = in_one_step(examples)
        return batch, _metrics(self.policy.update_sft.remote(batch))

    def measure(self, examples: DataProto) -> tuple[dict[str, float], int]:
        """Return the summed cross-entropy of the response tokens, and their number."""
        log_probs = read(self.policy.compute_log_probs.remote(examples), ["old_log_probs"]).batch["old_log_probs"]
        log_probs = log_probs[examples.batch["response_mask"]]
        return {"sft/val_loss": -float(log_probs.double().sum())}, len(log_probs)


class DPO:
    """Preference optimization of a policy against a frozen reference, by the DPO or IPO loss."""

    figures = DPO_FIGURES

    def __init__(self, config: Config, policy: WorkerGroup, reference: WorkerGroup) -> None:
        self.policy, self.reference = policy, reference
        self.losses = partial(PREFERENCE_LOSSES[config.offline.preference_loss], beta=config.offline.beta)
        self.averages = config.offline.average_log_probs

    def step(self, examples: DataProto) -> tuple[Batch, dict[str, Any]]:
        """Make one optimizer step on the pairs."""
        batch, pairs, slopes = self._compare(in_one_step(examples))
        batch = batch.union(slopes)
        return batch, _pair_metrics(pairs, "dpo/", "reward") | _metrics(self.policy.update_dpo.remote(batch))

    def measure(self, examples: DataProto) -> tuple[dict[str, float], int]:
        """Return the summed loss and accuracy of the pairs, and their number."""
        _, pairs, _ = self._compare(examples)
        return _val_sums(pairs, "dpo/"), len(pairs.losses)

    def _compare(self, batch: DataProto) -> tuple[DataProtoFuture, PairLoss, DataProto]:
        """Return the batch with log-probs, the losses of the pairs, and the column of their slopes."""
        scored = batch.union(self.policy.compute_log_probs.remote(batch))
        scored = scored.union(self.reference.compute_ref_log_probs.remote(batch))
        columns = read(scored, ["old_log_probs", "ref_log_probs", "response_mask"]).batch
        mask = columns["response_mask"]
        divisors = mask.sum(-1).clamp(min=1) if self.averages else torch.ones(len(mask))
        policy, reference = (
            (torch.where(mask, columns[name].double(), 0.0).sum(-1) / divisors).view(-1, 2)
            for name in ("old_log_probs", "ref_log_probs")
        )
        names = ("chosen_ref_log_probs", "rejected_ref_log_probs")
        pairs, slopes = slopes_of(self.losses, policy, **dict(zip(names, reference.unbind(1), strict=True)))
        slopes = slopes / divisors.view(-1, 2)  # by the sums
        return scored, pairs, _slope_column(slopes, columns["old_log_probs"].dtype)


class RewardModeling:
    """Reward modeling by the Bradley-Terry loss: the chosen response of a pair gets the higher score."""

    figures = REWARD_MODEL_FIGURES

    def __init__(self, model: WorkerGroup) -> None:
        self.model = model

    def step(self, examples: DataProto) -> tuple[Batch, dict[str, Any]]:
        """Make one optimizer step on the pairs."""
        batch = in_one_step(examples)
        pairs, slopes = self._compare(batch)
        batch = batch.union(slopes)
        update = self.model.update_reward_model.remote(batch)
        return batch, _pair_metrics(pairs, "reward_model/", "score") | _metrics(update)

    def measure(self, examples: DataProto) -> tuple[dict[str, float], int]:
        """Return the summed loss and accuracy of the pairs, and their number."""
        pairs, _ = self._compare(examples)
        return _val_sums(pairs, "reward_model/"), len(pairs.losses)

    def _compare(self, batch: DataProto) -> tuple[PairLoss, DataProto]:
        scores = read(self.model.compute_scores.remote(batch), ["scores"]).batch["scores"]
        pairs, slopes = slopes_of(bradley_terry_loss, scores.double().view(-1, 2))
        return pairs, _slope_column(slopes, scores.dtype)


def in_one_step(examples: DataProto) -> DataProto:
    """Return the batch with row ids, and all rows in one mini-batch."""
    batch = with_row_ids(examples)
    batch.meta_info["mini_batches"] = [batch.batch["row_ids"].tolist()]
    return batch


def _metrics(update: DataProtoFuture) -> dict[str, Any]:
    return reduce_lists(update.get(()).meta_info["metrics"])


def _slope_column(slopes: Tensor, dtype: torch.dtype) -> DataProto:
    return DataProto.from_dict({"loss_slopes": slopes.flatten().to(dtype)})


def _pair_metrics(pairs: PairLoss, prefix: str, what: str) -> dict[str, float]:
    """Return the means over pairs; `what` is the name of the compared numbers."""
    margins = pairs.chosen_rewards - pairs.rejected_rewards
    return {
        f"{prefix}loss": float(pairs.losses.mean()),
        f"{prefix}accuracy": float(_accuracy(pairs).mean()),
        f"{prefix}margin": float(margins.mean()),
        f"{prefix}chosen_{what}": float(pairs.chosen_rewards.mean()),
        f"{prefix}rejected_{what}": float(pairs.rejected_rewards.mean()),
    }


def _val_sums(pairs: PairLoss, prefix: str) -> dict[str, float]:
    return {f"{prefix}val_loss": float(pairs.losses.sum()), f"{prefix}val_accuracy": float(_accuracy(pairs).sum())}


def _accuracy(pairs: PairLoss) -> Tensor:
    """Return 1 for a pair whose chosen response is preferred, 0.5 for a tie, else 0."""
    margins = pairs.chosen_rewards - pairs.rejected_rewards
    return (margins > 0).double() + 0.5 * (margins == 0).double()
