"""The losses of actor, critic and offline training, as the engine needs them.

Each returns the share of this part of a mini-batch in the loss, and metrics that add up over the parts.
"""

import torch
from torch import Tensor

from hybridflow.algorithms import PolicyLoss, aggregate_loss, clipped_value_loss, kl_loss, teacher_kl
from hybridflow.config import Config
from hybridflow.engines import LossFunction, Outputs
from hybridflow.protocol import DataProto
from hybridflow.workers.algorithm_functions import policy_loss
from hybridflow.workers.log_prob_mismatch import LARGEST, MEAN, log_prob_mismatch_of

AGGREGATED_METRICS = ("actor/policy_loss", "actor/kl_loss", "actor/teacher_loss")
"""Metrics of `actor_loss` that `actor.loss_aggregation` averages; the others are means over tokens, or the largest."""


def actor_columns(config: Config) -> tuple[str, ...]:
    """Return the batch columns that `actor_loss` reads with a configuration."""
    columns = {"response_mask", "rollout_log_probs", "old_log_probs", *policy_loss(config).columns}
    columns.discard("selected_tokens")  # the worker computes it
    if config.is_on_policy:
        columns.discard("old_log_probs")
    if config.corrects_rollouts:
        columns.add("rollout_weights")
    if config.algorithm.kl_in_loss:
        columns.add("ref_log_probs")
    if config.teacher.loss != "none":
        columns |= {"candidate_ids", "teacher_candidate_log_probs"}
    return tuple(sorted(columns))


def actor_loss(config: Config, kl_coef: float, num_tokens: int, num_sequences: int) -> LossFunction:
    """Return the loss: policy loss - entropy_coef * entropy + kl_coef * KL + teacher.coef * KL to the teacher.

    Each term is divided by the global counts of the mini-batch. If the update is on-policy, the old log-probs are the
    detached new ones: the ratio is exactly 1.
    """
    function = policy_loss(config)
    names = {"old_log_probs", *function.columns}
    max_response_length = config.data.max_response_length

    def loss(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, mask = outputs["log_probs"], _column(rows, "response_mask")
        columns = {name: _column(rows, name) for name in names if name != "old_log_probs" or not config.is_on_policy}
        if config.is_on_policy:
            columns["old_log_probs"] = log_probs.detach()
        policy = function(log_probs=log_probs, **{name: columns[name] for name in function.columns})
        if isinstance(policy, Tensor):  # a user's function may return the token losses alone
            not_clipped = torch.zeros_like(mask)
            policy = PolicyLoss(policy, not_clipped, not_clipped, torch.ones_like(policy))
        token_losses = policy.token_losses
        if config.corrects_rollouts:
            token_losses = token_losses * _column(rows, "rollout_weights")

        def share(token_values: Tensor, mode: str = "token-mean") -> Tensor:
            return aggregate_loss(
                token_values,
                mask,
                mode,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                max_response_length=max_response_length,
            )

        total = policy_share = share(token_losses, config.actor.loss_aggregation)
        metrics = {
            "actor/policy_loss": policy_share,
            "actor/clipfrac": share(policy.clipped.to(log_probs.dtype)),
            "actor/clipfrac_dual": share(policy.clipped_dual.to(log_probs.dtype)),
            "actor/entropy": share(outputs["entropies"].detach()),
            "actor/ppo_kl": share(columns["old_log_probs"] - log_probs.detach()),
        }
        mismatch = log_prob_mismatch_of(log_probs.detach(), _column(rows, "rollout_log_probs"))
        metrics |= {name: share(values) for name, values in mismatch.items()}
        metrics[LARGEST] = mismatch[MEAN].where(mask, 0).max()
        if "routes_changed" in outputs:
            metrics["actor/routes_changed"] = share(outputs["routes_changed"].to(log_probs.dtype))
        if config.actor.entropy_coef:
            entropy = share(outputs["entropies"], config.actor.loss_aggregation)
            total = total - config.actor.entropy_coef * entropy
        if config.algorithm.kl_in_loss:
            token_kl = kl_loss(
                log_probs=log_probs,
                ref_log_probs=_column(rows, "ref_log_probs"),
                response_mask=mask,
                kl_estimator=config.algorithm.kl_estimator,
                old_log_probs=columns["old_log_probs"] if config.algorithm.kl_importance_weight else None,
            )
            kl = share(token_kl, config.actor.loss_aggregation)
            total = total + kl_coef * kl
            metrics["actor/kl_loss"] = kl
        if config.teacher.loss != "none":
            token_kl = teacher_kl(
                candidate_log_probs=outputs["candidate_log_probs"],
                teacher_candidate_log_probs=_column(rows, "teacher_candidate_log_probs"),
                direction=config.teacher.loss,
            )
            kl = share(token_kl, config.actor.loss_aggregation)
            total = total + config.teacher.coef * kl
            metrics["actor/teacher_loss"] = kl
        return total, {name: value.detach() for name, value in metrics.items()}

    return loss


def critic_loss(config: Config, num_tokens: int, num_sequences: int) -> LossFunction:
    """Return the clipped value loss, divided by the global counts of the mini-batch."""

    def loss(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        mask = _column(rows, "response_mask")
        value = clipped_value_loss(
            new_values=outputs["values"],
            values=_column(rows, "values"),
            returns=_column(rows, "returns"),
            response_mask=mask,
            value_clip=config.critic.value_clip,
        )
        counts = {
            "num_tokens": num_tokens,
            "num_sequences": num_sequences,
            "max_response_length": config.data.max_response_length,
        }
        clipped = aggregate_loss(value.clipped.to(value.token_losses.dtype), mask, "token-mean", **counts)
        total = aggregate_loss(value.token_losses, mask, config.critic.loss_aggregation, **counts)
        return total, {"critic/clipfrac": clipped}

    return loss


def sft_loss(num_tokens: int) -> LossFunction:
    """Return the cross-entropy of the response tokens, averaged over the tokens of the whole mini-batch."""

    def loss(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        mask = _column(rows, "response_mask")
        total = aggregate_loss(
            -outputs["log_probs"], mask, "token-mean", num_tokens=num_tokens, num_sequences=len(rows)
        )
        return total, {}

    return loss


def slope_loss(output: str) -> LossFunction:
    """Return a linear loss: the sum over rows of `loss_slopes` times the summed output of the row.

    Its gradient equals that of a loss whose derivatives by the row sums are `loss_slopes`.
    """

    def loss(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        sums = torch.where(_column(rows, "response_mask"), outputs[output], 0.0).sum(-1)
        return (_column(rows, "loss_slopes") * sums).sum(), {}

    return loss


def _column(rows: DataProto, name: str) -> Tensor:
    column = rows.batch[name]
    return column.bool() if column.dtype != torch.bool and name == "response_mask" else column
