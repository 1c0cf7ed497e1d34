"""Stages of an algorithm that the controller computes itself: a batch in, new columns out.

Each stage is a small function that reads only the columns that it needs, from a batch that may be on other processes;
this module knows neither worker groups nor files.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hybridflow.algorithms import apply_kl_penalty, rollout_correction
from hybridflow.config import ActorConfig, AlgorithmConfig, Config, CriticConfig
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.runtime.random_streams import derive_seed
from hybridflow.trainers.episode_rows import EpisodeRows
from hybridflow.trainers.read_columns import Batch, read
from hybridflow.workers.algorithm_functions import advantage_estimator, reads_column


def corrected_rollouts(batch: Batch, config: AlgorithmConfig) -> tuple[DataProto, Tensor]:
    """Return `rollout_weights`, the factor of each token's policy loss, and numbers for `correction_metrics`.

    The numbers, (3, tokens), are of each response token: the weight, whether it is bounded, whether it is rejected.
    All rows of an episode are one sequence.
    """
    rows = EpisodeRows(batch)
    columns = rows.joined(read(batch, ("old_log_probs", "rollout_log_probs", "response_mask")).batch)
    mask = columns["response_mask"]
    correction = rollout_correction(
        **columns,
        rollout_weights=config.rollout_weights,
        rollout_weight_bounds=config.rollout_weight_bounds,
        rollout_weight_outside=config.rollout_weight_outside,
        rollout_reject={str(name): bounds for name, bounds in config.rollout_reject.items()},
    )
    numbers = [correction.weights[mask], correction.bounded[mask], correction.rejected[mask]]
    weights = DataProto.from_dict(rows.split({"rollout_weights": correction.weights}))
    return weights, torch.stack([x.double() for x in numbers])


def correction_metrics(parts: Sequence[Tensor]) -> dict[str, float]:
    """Return metrics of the rollout weights of a batch, from the numbers of its parts by `corrected_rollouts`."""
    weights, bounded, rejected = torch.cat(list(parts), dim=1)
    return {
        "rollout_correction/weight_mean": float(weights.mean()),
        "rollout_correction/weight_max": float(weights.max()),
        "rollout_correction/weight_min": float(weights.min()),
        "rollout_correction/bounded_share": float(bounded.mean()),
        "rollout_correction/rejected_share": float(rejected.mean()),
        "rollout_correction/effective_share": float(
            weights.sum().square() / (len(weights) * weights.square().sum()).clamp(min=1e-300)
        ),
    }


_Batch = TypeVar("_Batch", DataProto, DataProtoFuture)


def with_group_ids(prompts: DataProto, first: int = 0) -> DataProto:
    """Return the prompts with `group_ids` first, first + 1, ...; all responses to a prompt share its id."""
    return prompts.union(DataProto.from_dict({"group_ids": torch.arange(first, first + len(prompts))}))


def with_row_ids(batch: _Batch, first: int = 0) -> _Batch:
    """Return the batch with `row_ids` from `first` on, which identify a row in mini-batches and padding on any rank."""
    return batch.union(DataProto.from_dict({"row_ids": torch.arange(first, first + len(batch))}))


def needs_old_log_probs(config: Config) -> bool:
    """Return whether the step needs log-probs from before the update; an on-policy loss does not."""
    reads = "old_log_probs" in advantage_estimator(config).columns or reads_column(config, "sum_squared_probs")
    return reads or config.algorithm.kl_in_reward or config.corrects_rollouts or not config.is_on_policy


def rollout_as_old_log_probs(batch: Batch) -> DataProtoFuture:
    """Return the rollout engine's log-probs as `old_log_probs`."""
    return DataProtoFuture.of(batch).select_columns(["rollout_log_probs"]).rename("rollout_log_probs", "old_log_probs")


def needs_token_level_rewards(config: Config) -> bool:
    """Return whether the estimator reads rewards of tokens, or a KL penalty is subtracted from the rewards."""
    return config.algorithm.kl_in_reward or "token_level_rewards" in advantage_estimator(config).columns


def token_level_rewards(batch: Batch, config: AlgorithmConfig, kl_coef: float) -> tuple[DataProto, Tensor]:
    """Return `token_level_scores`, `token_level_rewards`, and the KL of each response token (none without a penalty).

    The score is at the last token of each response, but for rewards of turns, which are at the last token of each turn;
    the rewards are the scores minus the KL penalty.
    """
    rows, names = EpisodeRows(batch), ["response_mask", "scores"]
    if config.kl_in_reward:
        names += ["old_log_probs", "ref_log_probs"]
    if "turn_rewards" in (DataProtoFuture.of(batch).columns or ()):
        names.append("turn_rewards")
    columns = rows.joined(read(batch, names).batch)
    mask, scores = columns["response_mask"], columns["scores"]
    if "turn_rewards" in columns:
        of_turns = columns["turn_rewards"]
        scores = _at_last_token(scores - of_turns.sum(-1), mask) + of_turns
    else:
        scores = _at_last_token(scores, mask)
    if not config.kl_in_reward:
        unchanged = {"token_level_scores": scores, "token_level_rewards": scores.clone()}
        return DataProto.from_dict(rows.split(unchanged)), scores.new_zeros(0)
    rewards, kl = apply_kl_penalty(
        token_level_scores=scores,
        old_log_probs=columns["old_log_probs"],
        ref_log_probs=columns["ref_log_probs"],
        response_mask=mask,
        kl_coef=kl_coef,
        kl_estimator=config.kl_estimator,
    )
    return DataProto.from_dict(rows.split({"token_level_scores": scores, "token_level_rewards": rewards})), kl[mask]


def with_overlong_penalty(batch: DataProtoFuture, config: Config) -> DataProtoFuture:
    """Return the batch with the soft length penalty subtracted from its `scores`.

    DAPO, https://arxiv.org/abs/2503.14476, equation 13: each token of a response within the last `overlong_buffer`
    tokens before data.max_response_length costs overlong_penalty / overlong_buffer. Of an episode the longest row
    counts, with the tokens of answers, which have the same limit.
    """
    rows, has_turns = EpisodeRows(batch), "turn_ids" in (batch.columns or ())
    names = ("response_mask", "scores", "turn_ids") if has_turns else ("response_mask", "scores")
    columns = rows.joined(read(batch, names).batch)
    is_token = columns["turn_ids"] >= 0 if has_turns else columns["response_mask"]
    longest = is_token.reshape(len(is_token), rows.size, -1).sum(-1).amax(-1)
    buffer = config.reward.overlong_buffer
    over = longest - (config.data.max_response_length - buffer)
    penalty = config.reward.overlong_penalty * over.clamp(min=0) / buffer
    others = [name for name in batch.columns or () if name != "scores"]
    return batch.select_columns(others).union(DataProto.from_dict(rows.split({"scores": columns["scores"] - penalty})))


def add_advantages(batch: Batch, config: Config) -> DataProto:
    """Return `advantages` and `returns` of the estimator `algorithm.advantage`.

    If the KL is in the reward, an estimator that reads scores gets the sum of token rewards of each row.
    """
    estimator = advantage_estimator(config)
    penalized = config.algorithm.kl_in_reward and "scores" in estimator.columns
    rows = EpisodeRows(batch)
    names = {*estimator.columns}
    if penalized:
        names.add("token_level_rewards")
    if rows.size > 1:
        names.add("response_mask")
    columns = rows.joined(read(batch, names).batch)
    given = {name: columns[name] for name in estimator.columns}
    if penalized:
        given["scores"] = columns["token_level_rewards"].sum(-1)
    advantages, returns = estimator(**given)
    return DataProto.from_dict(rows.split({"advantages": advantages, "returns": returns}))


def updates_per_step(config: Config, section: ActorConfig | CriticConfig) -> int:
    """Return the number of optimizer steps in one training step."""
    prompts = config.data.train_batch_size
    return section.epochs * (prompts // (section.mini_batch_size or prompts))


def mini_batch_rows(batch: Batch, mini_batch_size: int, epochs: int, seed_keys: tuple[int, ...]) -> list[list[int]]:
    """Return the row ids of each mini-batch: `mini_batch_size` prompts (0: all) with all their responses.

    With several mini-batches, the prompts are shuffled anew in each epoch; the order depends only on `seed_keys`.
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
    """Return scores (batch,) as (batch, response_len): at the last response token, zero elsewhere."""
    positions = torch.arange(mask.shape[1])
    is_last = positions == (mask * positions).max(-1, keepdim=True).values
    return torch.where(is_last & mask, scores[:, None], 0.0)
