"""Findings about rewards: without difference, solved, format, errors and time-outs."""

import math

from hybridflow.algorithms.declarations import ESTIMATORS
from hybridflow.observability.advice.evidence import Evidence, Row
from hybridflow.observability.advice.finding import (
    Change,
    Finding,
    Seen,
    above,
    decide,
    hotter,
    instead,
    mean_above,
    times,
)


def _solved(evidence: Evidence, threshold: float) -> Seen | None:
    mean = evidence.mean("critic/score/mean")
    lowest = min((row["critic/score/min"] for row in evidence.rows if "critic/score/min" in row), default=0.0)
    highest = max((row["critic/score/max"] for row in evidence.rows if "critic/score/max" in row), default=0.0)
    if mean is None or highest < 1 or highest == lowest or mean <= lowest + threshold * (highest - lowest):
        return None
    return Seen(f"the mean score is {mean:.3g}, and the highest score of the run is {highest:.3g}")


def _compares_scores(evidence: Evidence) -> bool:
    """Return whether equal scores give equal advantages; an estimator of the user's own is taken to compare them."""
    estimator = ESTIMATORS.get(evidence.config["algorithm.advantage"])
    others = {"teacher_log_probs", "reward_components"}
    return estimator is None or not (estimator.is_zero or others.intersection(estimator.extra_columns))


def _std(row: Row, name: str) -> float | None:
    """Return the largest standard deviation of numbers with this mean, minimum and maximum (Bhatia and Davis, 2000).

    It is that of numbers which all are the minimum or the maximum, such as scores of 0 and 1.
    """
    mean, low, high = (row.get(f"{name}/{kind}") for kind in ("mean", "min", "max"))
    if mean is None or low is None or high is None:
        return None
    return math.sqrt(max(0.0, (high - mean) * (mean - low)))


def _difference_from_greedy(row: Row) -> float | None:
    """Return the largest advantage of a step of ReMax, which subtracts the scores of greedy responses."""
    low, high = row.get("critic/advantages/min"), row.get("critic/advantages/max")
    return None if low is None or high is None else max(abs(low), abs(high))


def _equal_rewards(evidence: Evidence, threshold: float) -> Seen | None:
    config = evidence.config
    if not _compares_scores(evidence) or config["data.train_batch_size"] * config["rollout.group_size"] == 1:
        return None
    estimator = ESTIMATORS.get(config["algorithm.advantage"])
    has_baseline = estimator is not None and "baseline_scores" in estimator.extra_columns
    values = [_difference_from_greedy(row) if has_baseline else _std(row, "critic/score") for row in evidence.recent]
    known = [value for value in values if value is not None]
    mean = evidence.mean("critic/score/mean")
    if not known or mean is None or not math.fsum(known) / len(known) < threshold:
        return None
    what = (
        "the largest difference of a score from that of the greedy response"
        if has_baseline
        else ("the standard deviation of the scores of a step")
    )
    return Seen(f"{what} is at most {math.fsum(known) / len(known):.2g} (mean score {mean:.3g})")


def _equal_groups(evidence: Evidence, threshold: float) -> Seen | None:
    estimator = ESTIMATORS.get(evidence.config["algorithm.advantage"])
    if not estimator or not estimator.compares_groups or not _compares_scores(evidence):
        return None
    share, where = evidence.mean("critic/zero_variance_groups"), "groups"
    differing = evidence.mean("sampling/differing_groups")
    if differing is not None:
        share, where = 1 - differing, "sampled groups"
    if share is None or not share > threshold:
        return None
    return Seen(f"the responses to a prompt have equal scores in {share:.0%} of the {where}")


def _format(evidence: Evidence, threshold: float) -> Seen | None:
    for name in evidence.names("reward/*format*/mean"):
        mean = evidence.mean(name)
        if mean is not None and mean < threshold:
            return Seen(f"{name} is {mean:.2g}")
    return None


REWARDS = (
    Finding(
        "task solved",
        "solved",
        "mean of `critic/score/mean`, relative to the lowest and highest score of the run, above the threshold, and a "
        "score of at least 1 was seen",
        _solved,
        "Responses without mistakes have equal rewards, from which the policy learns nothing more.",
        (
            Change("data.train_files", decide),
            Change("data.order", decide),
            Change("algorithm.filter_groups", instead(False, True)),
        ),
        hides=("equal rewards", "groups without variance", "entropy collapse"),
    ),
    Finding(
        "equal rewards",
        "score_std",
        "bound of the standard deviation of a step's scores, from their mean, minimum and maximum, below the threshold",
        _equal_rewards,
        "Advantages are differences of scores: without a difference there is no learning signal.",
        (
            Change("reward.function", decide),
            Change("rollout.temperature", hotter),
            Change("rollout.top_p", lambda now: (1.0,) if now < 1 else None),
            Change("data.max_response_length", times(2, 4)),
        ),
        hides=("groups without variance",),
        at_first_step=0.0,
    ),
    Finding(
        "groups without variance",
        "zero_variance_groups",
        "`critic/zero_variance_groups` above the threshold; with dynamic sampling 1 - `sampling/differing_groups`",
        _equal_groups,
        "A group with equal scores has advantages of 0, so its generation is spent without a learning signal.",
        (
            Change("rollout.group_size", times(2, 4)),
            Change("rollout.temperature", hotter),
            Change("rollout.top_p", lambda now: (1.0,) if now < 1 else None),
            Change("algorithm.filter_groups", instead(False, True)),
            Change("data.train_files", decide),
        ),
        at_first_step=0.999,
    ),
    Finding(
        "format never right",
        "format",
        "`reward/<name>/mean` below the threshold, for a name with 'format'",
        _format,
        "A response in a wrong format earns nothing, however right it is; the policy cannot find the format by chance.",
        (
            Change("data.train_files", decide),
            Change("data.max_response_length", times(2, 4)),
            Change("reward.function", decide),
        ),
    ),
    Finding(
        "reward errors",
        "reward_errors",
        "`reward/error_rate` above the threshold",
        mean_above("the reward function fails on {mean:.1%} of the samples", "reward/error_rate"),
        "A failed sample gets reward.error_score, whatever the response says, so the policy learns from noise.",
        (
            Change("reward.function", decide),
            Change("reward.on_error", instead("zero", "stop")),
        ),
        at_first_step=0.3,
    ),
    Finding(
        "reward time-outs",
        "reward_timeouts",
        "`reward/timeout_rate` above the threshold",
        mean_above("the reward function times out on {mean:.1%} of the samples", "reward/timeout_rate"),
        "A sample that times out gets reward.error_score, and its step waits for the deadline.",
        (
            Change("reward.timeout_s", times(2, 5)),
            Change("reward.processes", times(2, 4)),
            Change("reward.concurrency", above(1, 1)),
        ),
        at_first_step=0.3,
    ),
)
