"""The steps of an algorithm that the controller computes itself: batch in, new columns out.

Everything here is small: it reads the columns that its arithmetic needs, of a batch that may be elsewhere, and knows
neither groups nor files.
"""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from hybridflow.algorithms import ADVANTAGES, apply_kl_penalty
from hybridflow.config import AlgorithmConfig, Config
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.runtime import derive_seed
from hybridflow.workers.signature_columns import columns_of, parameters_of

Batch = DataProto | DataProtoFuture
_Batch = TypeVar("_Batch", DataProto, DataProtoFuture)


def read(batch: Batch, columns: Iterable[str]) -> DataProto:
    """The named columns: the one way by which the controller looks at the contents of a batch."""
    return DataProtoFuture.of(batch).get(tuple(columns))


def with_group_ids(prompts: DataProto) -> DataProto:
    """The prompts with `group_ids`, their place in the batch; their responses will share it."""
    return prompts.union(DataProto.from_dict({"group_ids": torch.arange(len(prompts))}))


def with_row_ids(batch: _Batch) -> _Batch:
    """The batch with `row_ids`, the name by which mini-batches and padding know a row wherever it is."""
    return batch.union(DataProto.from_dict({"row_ids": torch.arange(len(batch))}))


def needs_old_log_probs(config: Config) -> bool:
    """Whether anything reads log-probs from before the update; where it is on-policy, its ratio does not."""
    return config.algorithm.kl_in_reward or not config.is_on_policy


def rollout_as_old_log_probs(batch: Batch) -> DataProtoFuture:
    """`old_log_probs` as the rollout engine computed them while it sampled."""
    return DataProtoFuture.of(batch).select_columns(["rollout_log_probs"]).rename("rollout_log_probs", "old_log_probs")


def needs_token_level_rewards(config: AlgorithmConfig) -> bool:
    """Whether the estimator looks at single tokens; critic-free ones read one score a row."""
    return "token_level_rewards" in columns_of(ADVANTAGES[config.advantage])


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


def add_advantages(batch: Batch, config: AlgorithmConfig) -> DataProto:
    """`advantages` and `returns` by the estimator that `algorithm.advantage` names."""
    estimator = ADVANTAGES[config.advantage]
    columns = read(batch, columns_of(estimator)).batch
    advantages, returns = estimator(**columns, **parameters_of(estimator, config))
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
