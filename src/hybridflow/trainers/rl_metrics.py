"""Metrics of a training step that are computed from its batch."""

import math
from collections.abc import Sequence

import torch

from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.runtime.observe import spread
from hybridflow.trainers.episode_rows import EpisodeRows
from hybridflow.trainers.read_columns import Batch, Lengths, read, row_lengths
from hybridflow.workers.log_prob_mismatch import KL, LARGEST, MEAN, SHARE

ENDS = ("done", "turns", "tokens", "seconds", "rows", "error")
"""Why an episode ended: the values of `EndReason`."""

_COLUMNS = ("response_mask", "turn_ids", "num_tool_calls", "num_tool_errors", "finish_reasons")


def episode_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics `episode/...` of a batch with episodes; an empty dictionary without."""
    if "episode_ids" not in (DataProtoFuture.of(batch).columns or ()):
        return {}
    data, rows = read(batch, _COLUMNS), EpisodeRows(batch)
    columns = rows.joined(data.batch)
    ends = data.non_tensor_batch["finish_reasons"][:: rows.size].tolist()
    calls, errors = columns["num_tool_calls"].sum().item(), columns["num_tool_errors"].sum().item()
    turns = columns["turn_ids"].where(columns["response_mask"], -1).amax(-1) + 1
    return {
        **spread("episode/turns", turns.tolist()),
        "episode/tool_calls": calls / len(ends),
        "episode/tool_error_rate": errors / max(calls, 1),
        **{f"episode/ended_{reason}": ends.count(reason) / len(ends) for reason in ENDS},
    }


_ALWAYS = ("response_mask", "prompt_mask", "scores", "group_ids", "reward_failed", "reward_timed_out", "reward_extras")

AGES = {
    "age_0": (0, 0),
    "age_1": (1, 1),
    "age_2_to_3": (2, 3),
    "age_4_to_7": (4, 7),
    "age_8_to_15": (8, 15),
    "age_16_or_more": (16, math.inf),
}
"""First and last age of a token, in optimizer steps, by the name of the metric."""


def batch_metrics(batch: Batch, max_response_length: int) -> dict[str, float]:
    """Return metrics of scores, advantages, returns, values, lengths and rewards; docs/metrics.md lists their names."""
    present = DataProtoFuture.of(batch).columns or ()
    optional = [name for name in ("advantages", "returns", "values", "token_level_rewards") if name in present]
    if "teacher_log_probs" in present:
        optional += ["teacher_log_probs", "old_log_probs" if "old_log_probs" in present else "rollout_log_probs"]
    data = read(batch, [*_ALWAYS, *optional])
    columns = EpisodeRows(batch).joined(data.batch)
    mask = columns["response_mask"]
    lengths = mask.sum(-1)
    metrics = {
        **spread("critic/score", columns["scores"].tolist()),
        **spread("response_length", lengths.tolist()),
        **spread("prompt_length", columns["prompt_mask"].sum(-1).tolist()),
        "response_length/clip_ratio": float((lengths >= max_response_length).float().mean()),
        "critic/zero_variance_groups": zero_variance_share(columns["scores"], columns["group_ids"]),
        **_reward_rates(columns["scores"], columns["reward_failed"], columns["reward_timed_out"]),
    }
    for name in ("advantages", "returns", "values"):
        if name in columns:
            metrics |= spread(f"critic/{name}", columns[name].expand(mask.shape)[mask].tolist())
    if "teacher_log_probs" in columns:
        policy = columns["old_log_probs" if "old_log_probs" in columns else "rollout_log_probs"]
        metrics["teacher/kl"] = float((policy - columns["teacher_log_probs"])[mask].double().mean())
    if "token_level_rewards" in columns:
        metrics |= spread("critic/rewards", columns["token_level_rewards"].sum(-1).tolist())
    if "values" in columns:
        returns, values = columns["returns"][mask], columns["values"][mask]
        metrics["critic/vf_explained_var"] = explained_variance(returns, values)
    return metrics | extra_metrics(data) | episode_metrics(batch)


def staleness_metrics(batch: Batch, version: int, updates: int) -> dict[str, float]:
    """Return the number of optimizer steps between the weights that sampled a token and the current ones, and shares.

    `version`: optimizer steps before this batch; `updates`: those of this batch.
    """
    columns = read(batch, ("rollout_versions", "response_mask")).batch
    staleness = version - columns["rollout_versions"][columns["response_mask"]]
    oldest = float(staleness.max())
    ages = {
        f"staleness/{name}": float(((staleness >= first) & (staleness <= last)).double().mean())
        for name, (first, last) in AGES.items()
    }
    return {
        "staleness/mean": float(staleness.double().mean()),
        "staleness/max": oldest,
        "staleness/off_policy_updates": oldest + updates - 1,
        **ages,
    }


def _reward_rates(scores: torch.Tensor, failed: torch.Tensor, timed_out: torch.Tensor) -> dict[str, float]:
    """Return the shares of samples whose reward failed, timed out, or is 0 without a failure."""
    return {
        "reward/error_rate": float((failed & ~timed_out).float().mean()),
        "reward/timeout_rate": float(timed_out.float().mean()),
        "reward/zero_rate": float(((scores == 0) & ~failed).float().mean()),
    }


def lengths_of(batch: Batch) -> Lengths:
    """Return the lengths and groups of the rows, from which `Speedometer` computes the speed."""
    columns = read(batch, ("group_ids", "response_mask")).batch
    generated = columns["response_mask"].sum(-1)
    return Lengths((row_lengths(batch) - generated).tolist(), generated.tolist(), columns["group_ids"].tolist())


def log_prob_metrics(parts: Sequence[DataProtoFuture]) -> dict[str, float]:
    """Return entropy and log-prob mismatch of the policy before its update, from the sums of all ranks and parts."""
    columns = DataProto.concat([part.get() for part in parts]).batch
    means = {"actor/entropy": "entropy_sum", MEAN: "mismatch_sum", KL: "mismatch_kl_sum", SHARE: "mismatch_share_sum"}
    num_tokens = float(columns["num_tokens"].sum())
    metrics = {name: float(columns[column].sum()) / num_tokens for name, column in means.items()}
    return metrics | {LARGEST: float(columns["mismatch_max"].max())}


def explained_variance(returns: torch.Tensor, values: torch.Tensor) -> float:
    """Return 1 - var(returns - values) / var(returns); NaN if the returns are all equal."""
    variance = returns.var(correction=0)
    return float(1 - (returns - values).var(correction=0) / variance) if variance > 0 else float("nan")


def zero_variance_share(scores: torch.Tensor, group_ids: torch.Tensor) -> float:
    """Return the share of groups whose scores are all equal; a group-relative estimator learns nothing from them."""
    groups = group_ids.unique()
    num_equal = sum(bool((scores[group_ids == group] == scores[group_ids == group][0]).all()) for group in groups)
    return num_equal / len(groups)


def extra_metrics(batch: DataProto) -> dict[str, float]:
    """Return `reward/<name>/mean` of each extra number of the reward function, over the rows that have it."""
    values: dict[str, list[float]] = {}
    for extras in batch.non_tensor_batch["reward_extras"]:
        for name, value in extras.items():
            values.setdefault(name, []).append(value)
    return {f"reward/{name}/mean": sum(numbers) / len(numbers) for name, numbers in sorted(values.items())}
