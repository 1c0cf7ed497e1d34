"""Scalar float64 references of all advantage estimators and policy losses, written as in their papers.

This module does not import hybridflow. A batch is lists of rows; `mask[i]` marks the positions of row i that count.
"""

import math
from collections.abc import Callable, Sequence

Rows = list[list[float]]
Mask = list[list[bool]]


def groups_of(group_ids: Sequence[int]) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        rows.setdefault(group, []).append(row)
    return list(rows.values())


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sample_std(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((x - middle) ** 2 for x in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def over_tokens(rows: list[float], mask: Mask) -> Rows:
    return [[rows[i] if valid else 0.0 for valid in row] for i, row in enumerate(mask)]


def whiten(rows: Rows, mask: Mask) -> Rows:
    values = [x for row, valid in zip(rows, mask, strict=True) for x, v in zip(row, valid, strict=True) if v]
    if not values:
        return rows
    middle, variance = mean(values), sample_std(values) ** 2
    scale = 1 / math.sqrt(variance + 1e-8)
    return [
        [(x - middle) * scale if v else 0.0 for x, v in zip(row, valid, strict=True)]
        for row, valid in zip(rows, mask, strict=True)
    ]


def returns_of(rewards: Rows, mask: Mask, gamma: float) -> Rows:
    returns = []
    for row, valid in zip(rewards, mask, strict=True):
        places = [t for t, v in enumerate(valid) if v]
        sums = [0.0] * len(row)
        for n, t in enumerate(places):
            sums[t] = math.fsum(gamma**k * row[later] for k, later in enumerate(places[n:]))
        returns.append(sums)
    return returns


# Advantages: columns are lists, passed as keyword arguments; results have one number per row or per token.


def grpo(scores, group_ids, norm_by_std, **_):
    advantages = [0.0] * len(scores)
    for rows in groups_of(group_ids):
        own = [scores[i] for i in rows]
        for i in rows:
            if len(set(own)) > 1:
                advantages[i] = (scores[i] - mean(own)) / ((sample_std(own) + 1e-6) if norm_by_std else 1.0)
    return advantages


def rloo(scores, group_ids, **_):
    advantages = [0.0] * len(scores)
    for rows in groups_of(group_ids):
        for i in rows:
            others = [scores[j] for j in rows if j != i]
            advantages[i] = scores[i] - mean(others) if others else 0.0
    return advantages


def opo(scores, group_ids, response_mask, **_):
    lengths = [sum(row) for row in response_mask]
    advantages = [0.0] * len(scores)
    for rows in groups_of(group_ids):
        if len({scores[i] for i in rows}) == 1:
            continue
        total = sum(lengths[i] for i in rows)
        weights = {i: lengths[i] / total if total else 1 / len(rows) for i in rows}
        baseline = math.fsum(weights[i] * scores[i] for i in rows)
        for i in rows:
            advantages[i] = scores[i] - baseline
    return advantages


def gpg(scores, group_ids, norm_by_std, **_):
    groups = groups_of(group_ids)
    silent = sum(len({scores[i] for i in rows}) == 1 for rows in groups)
    alpha = len(groups) / (len(groups) - silent) if silent < len(groups) else 0.0
    return [alpha * advantage for advantage in grpo(scores, group_ids, norm_by_std)]


def pass_at_k(scores, group_ids, k, success_score, **_):
    """Compute it by its definition, over all subsets of k responses."""
    from itertools import combinations

    advantages = [0.0] * len(scores)
    for rows in groups_of(group_ids):
        subsets = list(combinations(rows, k))
        rewards = [max(float(scores[i] >= success_score) for i in subset) for subset in subsets]
        middle = mean(rewards)
        std = math.sqrt(mean([(reward - middle) ** 2 for reward in rewards]))
        for i in rows:
            own = [reward for subset, reward in zip(subsets, rewards, strict=True) if i in subset]
            advantages[i] = (mean(own) - middle) / std if std > 0 else 0.0
    return advantages


def gdpo(reward_components, group_ids, component_weights, **_):
    sums = [0.0] * len(group_ids)
    for k, weight in enumerate(component_weights):
        normed = grpo([row[k] for row in reward_components], group_ids, norm_by_std=True)
        sums = [total + weight * x for total, x in zip(sums, normed, strict=True)]
    if len(set(sums)) <= 1:
        return [0.0] * len(sums)
    middle, std = mean(sums), sample_std(sums)
    return [(total - middle) / (std + 1e-6) for total in sums]


def reinforce_plus_plus(token_level_rewards, response_mask, gamma, **_):
    return whiten(returns_of(token_level_rewards, response_mask, gamma), response_mask)


def reinforce_plus_plus_baseline(scores, group_ids, response_mask, **_):
    return whiten(over_tokens(grpo(scores, group_ids, norm_by_std=False), response_mask), response_mask)


def remax(token_level_rewards, baseline_scores, response_mask, **_):
    returns = returns_of(token_level_rewards, response_mask, gamma=1.0)
    return [
        [x - baseline if v else 0.0 for x, v in zip(row, valid, strict=True)]
        for row, baseline, valid in zip(returns, baseline_scores, response_mask, strict=True)
    ]


def gae(token_level_rewards, values, response_mask, gamma, lam, whiten_advantages, **_):
    advantages = [[0.0] * len(row) for row in values]
    for i, valid in enumerate(response_mask):
        places = [t for t, v in enumerate(valid) if v]
        deltas = [
            token_level_rewards[i][t]
            + gamma * (values[i][places[n + 1]] if n + 1 < len(places) else 0.0)
            - values[i][t]
            for n, t in enumerate(places)
        ]
        for n, t in enumerate(places):
            advantages[i][t] = math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[n:]))
    return whiten(advantages, response_mask) if whiten_advantages else advantages


def optimal_token_baseline(scores, group_ids, old_log_probs, sum_squared_probs, response_mask, **_):
    places = [[t for t, v in enumerate(row) if v] for row in response_mask]
    advantages = [[0.0] * len(row) for row in response_mask]

    def energy(i, n):
        return math.fsum(1 - 2 * math.exp(old_log_probs[i][t]) + sum_squared_probs[i][t] for t in places[i][: n + 1])

    for rows in groups_of(group_ids):
        if len({scores[i] for i in rows}) == 1:
            continue
        for n in range(max(len(places[i]) for i in rows)):
            there = [i for i in rows if len(places[i]) > n]
            if len(there) < 2:
                continue
            weights = {i: energy(i, n) for i in there}
            baseline = math.fsum(weights[i] * scores[i] for i in there) / math.fsum(weights.values())
            for i in there:
                advantages[i][places[i][n]] = scores[i] - baseline
    return advantages


def distillation(old_log_probs, teacher_log_probs, response_mask, **_):
    return [
        [t - p if v else 0.0 for p, t, v in zip(*row, strict=True)]
        for row in zip(old_log_probs, teacher_log_probs, response_mask, strict=True)
    ]


def none(response_mask, **_):
    return [[0.0] * len(row) for row in response_mask]


ADVANTAGES: dict[str, Callable] = {
    "distillation": distillation,
    "none": none,
    "gae": gae,
    "grpo": grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "pass@k": pass_at_k,
    "gdpo": gdpo,
    "optimal-token-baseline": optimal_token_baseline,
}


# Policy losses get the values of one response at its unmasked tokens. Each returns the losses of the tokens, and the
# derivative of each loss by the log-prob of the same token (for GMPO, of their sum by each log-prob).


def clip(x: float, lowest: float, highest: float) -> float:
    return min(max(x, lowest), highest)


def ppo(new, old, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_dual, **_):
    losses, slopes = [], []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = math.exp(n - o)
        objective = min(ratio * a, clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high) * a)
        moves = objective == ratio * a
        if clip_ratio_dual is not None and a < 0 and objective < clip_ratio_dual * a:
            objective, moves = clip_ratio_dual * a, False
        losses.append(-objective)
        slopes.append(-ratio * a if moves else 0.0)
    return losses, slopes


def decoupled_ppo(new, old, advantages, rollout, max_behavior_weight, **settings):
    losses, slopes = ppo(new, old, advantages, **settings)
    weights = [min(math.exp(o - r), max_behavior_weight) for o, r in zip(old, rollout, strict=True)]
    return [w * x for w, x in zip(weights, losses, strict=True)], [w * x for w, x in zip(weights, slopes, strict=True)]


def gspo(new, old, advantages, clip_ratio_low, clip_ratio_high, **_):
    ratio = math.exp(mean([n - o for n, o in zip(new, old, strict=True)]))
    losses, slopes = [], []
    for a in advantages:
        objective = min(ratio * a, clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high) * a)
        losses.append(-objective)
        slopes.append(-ratio * a if objective == ratio * a else 0.0)
    return losses, slopes


def gmpo(new, old, advantages, clip_ratio_low, clip_ratio_high, **_):
    product, moving = 1.0, []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = math.exp(n - o)
        lowest, highest = math.exp(-clip_ratio_low), math.exp(clip_ratio_high)
        bounded = min(ratio, highest) if a >= 0 else max(ratio, lowest)
        product *= bounded
        moving.append(bounded == ratio)
    of_sequence = product ** (1 / len(new))
    losses = [-a * of_sequence for a in advantages]
    slope = math.fsum(losses) / len(new)
    return losses, [slope if moves else 0.0 for moves in moving]


def cispo(new, old, advantages, clip_ratio_low, clip_ratio_high, **_):
    weights = [
        clip(math.exp(n - o), 1 - clip_ratio_low, 1 + clip_ratio_high) * a
        for n, o, a in zip(new, old, advantages, strict=True)
    ]
    return [-w * n for w, n in zip(weights, new, strict=True)], [-w for w in weights]


def reinforce(new, old, advantages, **_):
    return [-a * n for a, n in zip(advantages, new, strict=True)], [-a for a in advantages]


def sapo(new, old, advantages, tau_pos, tau_neg, **_):
    losses, slopes = [], []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio, tau = math.exp(n - o), tau_pos if a > 0 else tau_neg
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        losses.append(-4 / tau * gate * a)
        slopes.append(-4 * gate * (1 - gate) * ratio * a)
    return losses, slopes


def dppo(new, old, advantages, divergence, max_divergence, **_):
    losses, slopes = [], []
    for n, o, a in zip(new, old, advantages, strict=True):
        p, q = math.exp(n), math.exp(o)
        if divergence == "tv":
            distance = abs(p - q)
        else:
            distance = q * math.log(q / p) + ((1 - q) * math.log((1 - q) / (1 - p)) if q < 1 else 0.0)
        leaves = (a > 0 and p > q) or (a < 0 and p < q)
        losses.append(-math.exp(n - o) * a)
        slopes.append(0.0 if distance > max_divergence and leaves else losses[-1])
    return losses, slopes


def clip_cov(new, old, advantages, selected, **_):
    losses = [0.0 if s else -math.exp(n - o) * a for n, o, a, s in zip(new, old, advantages, selected, strict=True)]
    return losses, losses


def kl_cov(new, old, advantages, selected, penalty_coef, **_):
    losses, slopes = [], []
    for n, o, a, s in zip(new, old, advantages, selected, strict=True):
        x, width = abs(n - o), 1e-3
        distance = x - width / 2 if x > width else x**2 / (2 * width)
        losses.append(-math.exp(n - o) * a + (penalty_coef * distance if s else 0.0))
        slopes.append(-math.exp(n - o) * a + (penalty_coef * clip((n - o) / width, -1, 1) if s else 0.0))
    return losses, slopes


POLICY_LOSSES: dict[str, Callable] = {
    "ppo": ppo,
    "decoupled-ppo": decoupled_ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "reinforce": reinforce,
    "clip-cov": clip_cov,
    "kl-cov": kl_cov,
}
