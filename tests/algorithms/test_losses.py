"""Losses with numbers computed by hand; test_against_references.py has random batches."""

import math

import pytest
import torch

from hybridflow.algorithms import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    PREFERENCE_LOSSES,
    aggregate_loss,
    apply_kl_penalty,
    bradley_terry_loss,
    covariances,
    dpo_loss,
    ipo_loss,
    kl_loss,
    ppo_policy_loss,
    select_clip_cov,
    select_kl_cov,
    slopes_of,
)
from hybridflow.algorithms.aggregation import count_of

NAN = float("nan")

# Policy loss


def ppo(log_probs, old_log_probs, advantages, low=0.2, high=0.3, dual: float | None = 3.0, dtype=torch.float64):
    """Return the loss of one response and the gradient."""
    leaf = torch.as_tensor(log_probs, dtype=dtype).reshape(1, -1).requires_grad_()
    loss = ppo_policy_loss(
        log_probs=leaf,
        old_log_probs=torch.as_tensor(old_log_probs, dtype=dtype).reshape(1, -1),
        advantages=torch.tensor([advantages], dtype=dtype),
        response_mask=torch.ones(leaf.shape, dtype=torch.bool),
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_dual=dual,
    )
    loss.token_losses.sum().backward()
    assert leaf.grad is not None
    return loss, leaf.grad[0].tolist()


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_flows(low, high, dtype):
    log_probs = -torch.rand(5, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 30
    for advantage in (1.5, -0.25, 1e-3):
        loss, grad = ppo(log_probs, log_probs, [advantage], low, high, dtype=dtype)
        minus = (-torch.tensor(advantage, dtype=dtype)).item()
        assert (loss.ratio[0].tolist(), loss.token_losses[0].tolist(), grad) == ([1] * 5, [minus] * 5, [minus] * 5)
        assert not loss.clipped.any()


@pytest.mark.parametrize("dual", [3.0, None])
def test_a_huge_ratio_keeps_loss_and_gradient_finite(dual):
    loss, grad = ppo([0.0, 0.0, -500.0], [-500.0, -500.0, 0.0], [1.0, -1.0, -1.0], dual=dual, dtype=torch.float32)
    assert grad == [0, 0, 0]
    assert loss.token_losses.isfinite().all()


# KL


def kl_of(log_probs, ref_log_probs, old_log_probs=None):
    leaf = torch.tensor([log_probs], dtype=torch.float64).requires_grad_()
    ref, old = (None if x is None else torch.tensor([x], dtype=torch.float64) for x in (ref_log_probs, old_log_probs))
    mask = torch.ones(leaf.shape, dtype=torch.bool)
    kl = kl_loss(log_probs=leaf, ref_log_probs=ref, response_mask=mask, kl_estimator="k3", old_log_probs=old)
    kl.sum().backward()
    assert leaf.grad is not None
    return kl[0].tolist(), leaf.grad[0].tolist()


def test_k3_is_capped_without_pushing_away_and_precise_near_zero():
    log_probs = torch.linspace(-120, 0, 1201, dtype=torch.float64)
    kl, slopes = map(torch.tensor, kl_of(log_probs.tolist(), [0.0] * 1201))
    assert (slopes <= 0).all()  # the reference is more likely everywhere
    assert (slopes[log_probs < -20.05] == 0).all()
    assert (slopes[log_probs > -19.95][:-1] < 0).all()
    assert (kl.diff() <= 0).all()
    assert kl[0].item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
    close = KL_ESTIMATORS["k3"](torch.tensor([0.0]), torch.tensor([1e-3]))
    assert close.item() == pytest.approx(5.0016671e-7, rel=1e-3)


@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
def test_the_expected_gradient_of_a_weighted_kl_is_that_of_the_kl(kl_estimator):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    ref, old = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in ([1, 0, -1, 0.5], [0, 1, 0.5, -2]))
    log_probs, whole = logits.log_softmax(0), torch.ones(4, 1, dtype=torch.bool)  # each token is sampled once
    columns = {"log_probs": log_probs, "ref_log_probs": ref, "old_log_probs": old}
    kl = kl_loss(**{n: x[:, None] for n, x in columns.items()}, response_mask=whole, kl_estimator=kl_estimator)
    (found,) = torch.autograd.grad((old.exp() * kl[:, 0]).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_weighted_k3_beyond_its_caps_is_finite_and_not_reversed():
    # Log-ratio 30: capped at 20. log r = 25: at its cap, without gradient. Both.
    kl, slope = kl_of([-1.0, -30.0, -30.0], [-2.0, -5.0, -5.0], old_log_probs=[-31.0, -30.0, -60.0])
    at_cap = math.exp(20) - 21
    assert kl == pytest.approx([math.exp(20) * math.exp(-1), at_cap, math.exp(20) * at_cap], rel=1e-12)
    assert slope == pytest.approx([math.exp(20) * (1 - math.exp(-1)), 0, 0], rel=1e-12)


def test_the_penalty_lowers_the_score_of_each_token_without_gradient():
    rewards, kl = apply_kl_penalty(
        token_level_scores=torch.tensor([[0.0, 1.0, NAN]]),
        old_log_probs=torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True),
        ref_log_probs=torch.tensor([[-1.5, -1.0, NAN]]),
        response_mask=torch.tensor([[True, True, False]]),
        kl_coef=0.5,
        kl_estimator="k1",
    )
    assert (kl.tolist(), rewards.tolist()) == ([[0.5, -1, 0]], [[-0.25, 1.5, 0]])
    assert not any(result.requires_grad for result in (rewards, kl))


# Value loss


# Aggregation

LOSSES = torch.tensor([[1.0, 2.0, 6.0], [8.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


def test_a_loss_is_divided_by_a_count_of_its_mode():
    counts = {mode: count_of(mode, 4, 2) for mode in AGGREGATIONS}
    assert counts == dict.fromkeys(AGGREGATIONS, 2) | {"token-mean": 4, "token-sum": 1}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_fully_masked_batch_has_loss_zero_and_a_gradient_of_zeros(mode):
    leaf = LOSSES.clone().requires_grad_()
    counts = {"num_tokens": 0, "num_sequences": 0, "max_response_length": 5}
    loss = aggregate_loss(leaf, torch.zeros_like(MASK), mode, **counts)
    loss.backward()
    assert (loss.item(), leaf.grad.tolist()) == (0, [[0, 0, 0]] * 3)


# Selection of tokens by covariance

COVARIANCES = torch.tensor([0.5, 3.0, 7.0, 1.0, 5.0, 2.0], dtype=torch.float64)


def chosen(select, seed=0, **settings):
    return select(covariances=COVARIANCES, seed=seed, **settings).nonzero()[:, 0].tolist()


def test_covariances_by_hand():
    # log-probs -1, -2, -3 have mean -2; advantages 1, 0, 2 have mean 1
    found = covariances(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 0.0, 2.0]))
    assert found.tolist() == [0.0, 0.0, -1.0]


def test_clip_cov_draws_by_seed_from_tokens_within_the_bounds():
    draws = [chosen(select_clip_cov, seed, selected_share=0.4) for seed in range(40)]
    assert draws == [chosen(select_clip_cov, seed, selected_share=0.4) for seed in range(40)]
    assert {len(draw) for draw in draws} == {2}
    assert {token for draw in draws for token in draw} == {1, 3, 4, 5}
    assert chosen(select_clip_cov, selected_share=1.0, cov_low=2.5, cov_high=6.0) == [1, 4]  # too few within the bounds
    assert chosen(select_clip_cov, cov_low=8.0, cov_high=9.0) == []
    assert len(chosen(select_clip_cov)) == 1


def test_kl_cov_selects_the_largest_and_at_least_one():
    assert chosen(select_kl_cov, selected_share=0.5) == [1, 2, 4]
    assert chosen(select_kl_cov) == [2]
    assert select_kl_cov(covariances=COVARIANCES[:0], seed=0).tolist() == []


# Preferences

PAIRS = {
    "chosen_log_probs": torch.tensor([-3.0, -5.0], dtype=torch.float64),
    "rejected_log_probs": torch.tensor([-4.0, -2.0], dtype=torch.float64),
    "chosen_ref_log_probs": torch.tensor([-3.5, -5.0], dtype=torch.float64),
    "rejected_ref_log_probs": torch.tensor([-4.0, -4.0], dtype=torch.float64),
}
"""Log-ratios of the first pair: 0.5 and 0, of the second: 0 and 2."""


def test_preference_losses_by_hand():
    loss = dpo_loss(**PAIRS, beta=0.2)
    assert loss.losses.tolist() == pytest.approx([math.log(1 + math.exp(-0.1)), math.log(1 + math.exp(0.4))])
    for found in (loss, ipo_loss(**PAIRS, beta=0.2)):
        assert found.chosen_rewards.tolist() == pytest.approx([0.1, 0.0])
        assert found.rejected_rewards.tolist() == pytest.approx([0.0, 0.4])
    # margins of log-ratios 0.5 and -2, to be 1 / (2 * 0.2) = 2.5
    assert found.losses.tolist() == pytest.approx([(0.5 - 2.5) ** 2, (-2 - 2.5) ** 2])
    scores = {"chosen_scores": torch.tensor([1.0, 0.0]), "rejected_scores": torch.tensor([0.0, 3.0])}
    assert bradley_terry_loss(**scores).losses.tolist() == pytest.approx([math.log(1 + math.exp(-1)), 3.04858735])


def test_dpo_is_log_2_at_the_reference_and_finite_far_from_it():
    equal = dict.fromkeys(PAIRS, torch.tensor([-7.0]))
    assert dpo_loss(**equal, beta=3.0).losses.tolist() == pytest.approx([math.log(2)])
    far = dict(zip(PAIRS, torch.tensor([[-1e5, 0.0], [0.0, -1e5], [0.0, 0.0], [0.0, 0.0]]), strict=True))
    assert dpo_loss(**far, beta=1.0).losses.tolist() == [1e5, 0.0]


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_slopes_are_the_gradient_of_the_mean_loss(name):
    loss = PREFERENCE_LOSSES[name]
    sums = torch.stack([PAIRS["chosen_log_probs"], PAIRS["rejected_log_probs"]], dim=1)
    references = {key: PAIRS[key] for key in ("chosen_ref_log_probs", "rejected_ref_log_probs")}
    at, slopes = slopes_of(loss, sums, beta=0.3, **references)
    assert torch.equal(at.losses, loss(**PAIRS, beta=0.3).losses)
    for pair, side in ((0, 0), (0, 1), (1, 0), (1, 1)):
        step = torch.zeros_like(sums)
        step[pair, side] = 1e-6
        up, down = (slopes_of(loss, sums + s, beta=0.3, **references)[0].losses.mean() for s in (step, -step))
        assert slopes[pair, side].item() == pytest.approx(float(up - down) / 2e-6, rel=1e-6, abs=1e-8)


def test_slopes_of_scores_by_hand():
    _, slopes = slopes_of(bradley_terry_loss, torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    first_slope = 1 / (1 + math.exp(1)) / 2  # probability that it is not preferred, averaged over two pairs
    assert slopes.flatten().tolist() == pytest.approx([-first_slope, first_slope, -0.25, 0.25])
