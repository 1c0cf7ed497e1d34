"""The steps of an algorithm that the controller computes itself: batch in, new columns out.

Everything here is small: it reads the columns that its arithmetic needs, of a batch that may be elsewhere, and knows
neither groups nor files.
"""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from hybridflow.algorithms import apply_kl_penalty, rollout_correction
from hybridflow.config import AlgorithmConfig, Config
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.runtime import derive_seed
from hybridflow.workers.algorithm_functions import advantage_estimator, reads_column

Batch = DataProto | DataProtoFuture
_Batch = TypeVar("_Batch", DataProto, DataProtoFuture)


def read(batch: Batch, columns: Iterable[str]) -> DataProto:
    """The named columns: the one way by which the controller looks at the contents of a batch."""
    return DataProtoFuture.of(batch).get(tuple(columns))


def with_group_ids(prompts: DataProto, first: int = 0) -> DataProto:
    """The prompts with `group_ids`, numbers from `first` on; their responses will share them."""
    return prompts.union(DataProto.from_dict({"group_ids": torch.arange(first, first + len(prompts))}))


def with_row_ids(batch: _Batch) -> _Batch:
    """The batch with `row_ids`, the name by which mini-batches and padding know a row wherever it is."""
    return batch.union(DataProto.from_dict({"row_ids": torch.arange(len(batch))}))


def needs_old_log_probs(config: Config) -> bool:
    """Whether anything reads log-probs from before the update; where it is on-policy, its ratio does not."""
    reads = "old_log_probs" in advantage_estimator(config).columns or reads_column(config, "sum_squared_probs")
    return reads or config.algorithm.kl_in_reward or config.corrects_rollouts or not config.is_on_policy


def rollout_as_old_log_probs(batch: Batch) -> DataProtoFuture:
    """`old_log_probs` as the rollout engine computed them while it sampled."""
    return DataProtoFuture.of(batch).select_columns(["rollout_log_probs"]).rename("rollout_log_probs", "old_log_probs")


def needs_token_level_rewards(config: Config) -> bool:
    """Whether the estimator looks at single tokens, or scores are to lose the KL penalty of theirs."""
    return config.algorithm.kl_in_reward or "token_level_rewards" in advantage_estimator(config).columns


def token_level_rewards(batch: Batch, config: AlgorithmConfig, kl_coef: float) -> tuple[DataProto, float]:
    """`token_level_scores`, the score at each response's last token, and `token_level_rewards`, less the KL penalty.

    Also returns the mean KL over response tokens; 0 where there is no penalty.
    """
    log_probs = ("old_log_probs", "ref_log_probs") if config.kl_in_reward else ()
    columns = read(batch, ("response_mask", "scores", *log_probs)).batch
    mask = columns["response_mask"]
    scores = _at_last_token(columns["scores"], mask)
    if not config.kl_in_reward:
        return DataProto.from_dict({"token_level_scores": scores, "token_level_rewards": scores.clone()}), 0.0
    rewards, kl = apply_kl_penalty(
        token_level_scores=scores,
        old_log_probs=columns["old_log_probs"],
        ref_log_probs=columns["ref_log_probs"],
        response_mask=mask,
        kl_coef=kl_coef,
        kl_estimator=config.kl_estimator,
    )
    mean_kl = float(kl[mask].mean())
    return DataProto.from_dict({"token_level_scores": scores, "token_level_rewards": rewards}), mean_kl


def with_overlong_penalty(batch: DataProtoFuture, config: Config) -> DataProtoFuture:
    """The batch whose `scores` are less by what responses near data.max_response_length lose.

    https://arxiv.org/abs/2503.14476 (DAPO), equation 13, where no response exceeds the limit: of the last
    `overlong_buffer` tokens a response may have, each it has costs overlong_penalty / overlong_buffer.
    """
    columns = read(batch, ("response_mask", "scores")).batch
    buffer = config.reward.overlong_buffer
    over = columns["response_mask"].sum(-1) - (config.data.max_response_length - buffer)
    penalty = config.reward.overlong_penalty * over.clamp(min=0) / buffer
    others = [name for name in batch.columns or () if name != "scores"]
    return batch.select_columns(others).union(DataProto.from_dict({"scores": columns["scores"] - penalty}))


def corrected_rollouts(batch: Batch, config: AlgorithmConfig) -> tuple[DataProto, dict[str, float]]:
    """`rollout_weights`, what each token's policy loss is multiplied with, and what is to be said of them."""
    columns = read(batch, ("old_log_probs", "rollout_log_probs", "response_mask")).batch
    mask = columns["response_mask"]
    correction = rollout_correction(
        **columns,
        rollout_weights=config.rollout_weights,
        rollout_weight_bounds=config.rollout_weight_bounds,
        rollout_weight_outside=config.rollout_weight_outside,
        rollout_reject={str(name): bounds for name, bounds in config.rollout_reject.items()},
    )
    weights = correction.weights[mask].double()
    metrics = {
        "rollout_correction/weight_mean": float(weights.mean()),
        "rollout_correction/weight_max": float(weights.max()),
        "rollout_correction/weight_min": float(weights.min()),
        "rollout_correction/bounded_share": float(correction.bounded[mask].double().mean()),
        "rollout_correction/rejected_share": float(correction.rejected[mask].double().mean()),
        "rollout_correction/effective_share": float(
            weights.sum().square() / (len(weights) * weights.square().sum()).clamp(min=1e-300)
        ),
    }
    return DataProto.from_dict({"rollout_weights": correction.weights}), metrics


def add_advantages(batch: Batch, config: Config) -> DataProto:
    """`advantages` and `returns` by the estimator that `algorithm.advantage` names.

    Where the KL is in the reward, an estimator of scores is given each row's sum of token rewards.
    """
    estimator = advantage_estimator(config)
    penalised = config.algorithm.kl_in_reward and "scores" in estimator.columns
    columns = read(batch, {*estimator.columns, *["token_level_rewards"] * penalised}).batch
    given = {name: columns[name] for name in estimator.columns}
    if penalised:
        given["scores"] = columns["token_level_rewards"].sum(-1)
    advantages, returns = estimator(**given)
    return DataProto.from_dict({"advantages": advantages, "returns": returns})


def mini_batch_rows(batch: Batch, mini_batch_size: int, epochs: int, seed_keys: tuple[int, ...]) -> list[list[int]]:
    """The row ids of each optimizer step: `mini_batch_size` prompts with all their responses, 0 for all prompts.

    Where there are several steps, the prompts of each epoch are dealt out anew, by `seed_keys` and nothing else.
    """
    columns = read(batch, ("group_ids", "row_ids")).batch
    group_ids, row_ids = columns["group_ids"], columns["row_ids"]
    groups = group_ids.unique()
    size = mini_batch_size or len(groups)
    memberships = []
    for epoch in range(epochs):
        if size >= len(groups):
            memberships.append(row_ids.tolist())
            continue
        generator = torch.Generator().manual_seed(derive_seed(*seed_keys, epoch))
        order = groups[torch.randperm(len(groups), generator=generator)]
        memberships += [row_ids[torch.isin(group_ids, members)].tolist() for members in order.split(size)]
    return memberships


def _at_last_token(scores: Tensor, mask: Tensor) -> Tensor:
    """(batch,) -> (batch, response_len), zero but at the last response token."""
    positions = torch.arange(mask.shape[1])
    is_last = positions == (mask * positions).max(-1, keepdim=True).values
    return torch.where(is_last & mask, scores[:, None], 0.0)
