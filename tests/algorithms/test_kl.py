import math
from inspect import unwrap

import pytest
import torch

from hybridflow.algorithms import KL_ESTIMATORS, apply_kl_penalty, kl_loss
from hybridflow.errors import AlgorithmError

NAN, INF = float("nan"), float("inf")


def reference_kl(log_p: float, log_q: float, name: str) -> tuple[float, float]:
    """Compute the estimator of Schulman's note with r = q / p, and its derivative with respect to log p."""
    log_r = log_q - log_p
    return {
        "k1": (-log_r, 1.0),
        "k2": (log_r**2 / 2, -log_r),
        "k3": (math.exp(log_r) - 1 - log_r, 1 - math.exp(log_r)),
        "abs": (abs(log_r), math.copysign(1.0, -log_r)),
    }[name]


def test_estimators_of_a_token_twice_as_likely_as_in_the_reference():
    log_probs, ref_log_probs = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    log_two = math.log(2)
    expected = {"k1": log_two, "k2": log_two**2 / 2, "k3": 0.5 - 1 + log_two, "abs": log_two}
    for name, estimate in KL_ESTIMATORS.items():
        assert estimate(log_probs, ref_log_probs).item() == pytest.approx(expected[name], rel=1e-6)


def test_equal_policies_have_a_kl_of_exactly_zero():
    log_probs = torch.tensor([-0.5, -20.0])
    for estimate in KL_ESTIMATORS.values():
        assert estimate(log_probs, log_probs).tolist() == [0, 0]


def test_k1_and_k3_have_the_kl_as_their_expectation():
    p, q = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    kl = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for name in ("k1", "k3"):
        assert (p * KL_ESTIMATORS[name](p.log(), q.log())).sum().item() == pytest.approx(kl, rel=1e-12)


def test_k3_never_pushes_away_from_the_reference():
    log_probs = torch.linspace(-120, 0, 1201, dtype=torch.float64).requires_grad_()
    kl = KL_ESTIMATORS["k3"](log_probs, torch.zeros(1201, dtype=torch.float64))
    kl.sum().backward()
    gradient = log_probs.grad
    assert (gradient <= 0).all()  # the reference is more likely everywhere
    assert (gradient[log_probs < -20.05] == 0).all()
    assert (gradient[log_probs > -19.95][:-1] < 0).all()
    assert (kl.diff() <= 0).all()
    assert kl[0].item() == pytest.approx(math.exp(20) - 21, rel=1e-12)


def test_k3_is_precise_near_zero():
    log_probs, ref_log_probs = torch.tensor([0.0]), torch.tensor([1e-3])
    assert KL_ESTIMATORS["k3"](log_probs, ref_log_probs).item() == pytest.approx(5.0016671e-7, rel=1e-3)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_the_loss_equals_the_scalar_reference_on_ragged_batches(name, ragged_batches):
    for mask, (log_probs, ref_log_probs) in ragged_batches(2):
        leaf = torch.tensor(log_probs, dtype=torch.float64).requires_grad_()
        kl = kl_loss(
            log_probs=leaf,
            ref_log_probs=torch.tensor(ref_log_probs, dtype=torch.float64),
            response_mask=torch.tensor(mask, dtype=torch.bool),
            kl_estimator=name,
        )
        kl.sum().backward()
        assert leaf.grad is not None
        for row, valid in enumerate(mask):
            for t, is_valid in enumerate(valid):
                expected = expected_slope = 0.0
                if is_valid:
                    expected, expected_slope = reference_kl(log_probs[row][t], ref_log_probs[row][t], name)
                assert kl[row, t].item() == pytest.approx(expected, rel=1e-10, abs=1e-14)
                assert leaf.grad[row, t].item() == pytest.approx(expected_slope, rel=1e-10, abs=1e-14)


LOGITS = [0.3, -0.2, 1.1, 0.0]
OLD_LOGITS, REF_LOGITS = [1.0, 0.4, -0.3, 0.2], [-0.5, 0.9, 0.1, 0.6]


def log_distribution(logits: list[float]) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.float64).log_softmax(-1)


def gradient_by_logits(loss_of) -> list[float]:
    """Return the gradient of a loss of the four log-probs by the logits of the policy."""
    logits = torch.tensor(LOGITS, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(logits.log_softmax(-1)), logits)
    return gradient.tolist()


def expected_k3_gradient(old: torch.Tensor, *, is_weighted: bool) -> list[float]:
    """Return the gradient of the expected loss of one token, sampled from the old policy."""

    def expected_loss(log_probs):
        kl = kl_loss(
            log_probs=log_probs[:, None],  # a row for each token of the vocabulary
            ref_log_probs=log_distribution(REF_LOGITS)[:, None],
            response_mask=torch.ones(4, 1, dtype=torch.bool),
            kl_estimator="k3",
            old_log_probs=old[:, None] if is_weighted else None,
        )
        return (old.exp() * kl[:, 0]).sum()

    return gradient_by_logits(expected_loss)


@pytest.mark.parametrize("old_logits", [OLD_LOGITS, LOGITS])
def test_weighted_k3_has_the_gradient_of_the_kl_off_and_on_policy(old_logits):
    ref = log_distribution(REF_LOGITS)
    exact = gradient_by_logits(lambda log_probs: (log_probs.exp() * (log_probs - ref)).sum())
    old = log_distribution(old_logits)
    assert expected_k3_gradient(old, is_weighted=True) == pytest.approx(exact, rel=1e-12, abs=1e-15)
    plain = expected_k3_gradient(old, is_weighted=False)
    assert max(abs(a - b) for a, b in zip(plain, exact, strict=True)) > 0.05


def test_plain_k3_on_policy_has_the_gradient_of_the_other_direction():
    ref = log_distribution(REF_LOGITS)
    other = gradient_by_logits(lambda log_probs: (ref.exp() * (ref - log_probs)).sum())
    assert expected_k3_gradient(log_distribution(LOGITS), is_weighted=False) == pytest.approx(other, rel=1e-12)


def weighted_k3(log_probs, ref_log_probs, old_log_probs, mask=None):
    """Return the weighted k3 of tokens and its derivative by their log-probs."""
    leaf = torch.tensor([log_probs], dtype=torch.float64).requires_grad_()
    ref, old = (torch.tensor([values], dtype=torch.float64) for values in (ref_log_probs, old_log_probs))
    mask = torch.tensor([mask or [True] * len(log_probs)])
    kl = kl_loss(log_probs=leaf, ref_log_probs=ref, response_mask=mask, kl_estimator="k3", old_log_probs=old)
    kl.sum().backward()
    assert leaf.grad is not None
    return kl[0].tolist(), leaf.grad[0].tolist()


def test_weighted_k3_by_hand():
    # Ratio 2, reference / policy 1/2; a masked NaN.
    kl, slope = weighted_k3([math.log(0.5), NAN], [math.log(0.25), INF], [math.log(0.25), NAN], [True, False])
    assert kl == pytest.approx([2 * (0.5 - 1 + math.log(2)), 0], rel=1e-12)
    assert slope == pytest.approx([2 * math.log(2), 0], rel=1e-12)


def test_weighted_k3_beyond_its_caps_is_finite_and_not_reversed():
    # Log-ratio 30: capped at 20. log r = 25: at its cap, without gradient. Both.
    kl, slope = weighted_k3([-1.0, -30.0, -30.0], [-2.0, -5.0, -5.0], [-31.0, -30.0, -60.0])
    at_cap = math.exp(20) - 21
    assert kl == pytest.approx([math.exp(20) * math.exp(-1), at_cap, math.exp(20) * at_cap], rel=1e-12)
    assert slope == pytest.approx([math.exp(20) * (1 - math.exp(-1)), 0, 0], rel=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "abs"])
def test_only_k3_can_be_weighted(name):
    column, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(AlgorithmError, match=f"no weighted KL estimator '{name}'; valid are 'k3'"):
        kl_loss(log_probs=column, ref_log_probs=column, response_mask=mask, kl_estimator=name, old_log_probs=column)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_the_loss_of_a_far_reference_is_finite(name):
    log_probs = torch.tensor([[-500.0, 0.0]], requires_grad=True)
    kl = kl_loss(
        log_probs=log_probs,
        ref_log_probs=torch.tensor([[0.0, -500.0]]),
        response_mask=torch.tensor([[True, True]]),
        kl_estimator=name,
    )
    kl.sum().backward()
    assert log_probs.grad is not None
    assert kl.isfinite().all()
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_masked_nan_reaches_neither_loss_nor_gradient(name):
    log_probs = torch.tensor([[-1.0, NAN, -INF]], requires_grad=True)
    kl = kl_loss(
        log_probs=log_probs,
        ref_log_probs=torch.tensor([[-2.0, NAN, INF]]),
        response_mask=torch.tensor([[True, False, False]]),
        kl_estimator=name,
    )
    kl.sum().backward()
    assert log_probs.grad is not None
    assert kl[0, 1:].tolist() == log_probs.grad[0, 1:].tolist() == [0, 0]


def test_the_penalty_lowers_the_score_of_each_token():
    rewards, kl = apply_kl_penalty(
        token_level_scores=torch.tensor([[0.0, 1.0, NAN]]),
        old_log_probs=torch.tensor([[-1.0, -2.0, NAN]]),
        ref_log_probs=torch.tensor([[-1.5, -1.0, NAN]]),
        response_mask=torch.tensor([[True, True, False]]),
        kl_coef=0.5,
        kl_estimator="k1",
    )
    assert kl.tolist() == [[0.5, -1, 0]]
    assert rewards.tolist() == [[-0.25, 1.5, 0]]


def test_the_penalty_has_no_gradient():
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    column, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    rewards, kl = apply_kl_penalty(
        token_level_scores=column,
        old_log_probs=log_probs,
        ref_log_probs=column,
        response_mask=mask,
        kl_coef=0.1,
        kl_estimator="k3",
    )
    assert not rewards.requires_grad
    assert not kl.requires_grad


def test_an_unknown_estimator_names_the_valid_ones():
    column, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(AlgorithmError, match="no KL estimator 'k4'; valid are 'k1', 'k2', 'k3', 'abs'"):
        kl_loss(log_probs=column, ref_log_probs=column, response_mask=mask, kl_estimator="k4")


def test_wrong_shapes_and_ranges_are_rejected():
    raw = unwrap(apply_kl_penalty)
    good, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    settings = {"kl_coef": 0.1, "kl_estimator": "k1"}
    with pytest.raises(
        AlgorithmError, match=r"ref_log_probs has shape \(2, 1\).*token_level_scores has shape \(2, 3\)"
    ):
        raw(token_level_scores=good, old_log_probs=good, ref_log_probs=good[:, :1], response_mask=mask, **settings)
    with pytest.raises(AlgorithmError, match="kl_coef=-1"):
        raw(
            token_level_scores=good,
            old_log_probs=good,
            ref_log_probs=good,
            response_mask=mask,
            **{**settings, "kl_coef": -1},
        )
    with pytest.raises(AlgorithmError, match=r"ref_log_probs has shape \(3, 3\), but log_probs has shape \(2, 3\)"):
        unwrap(kl_loss)(log_probs=good, ref_log_probs=torch.zeros(3, 3), response_mask=mask, kl_estimator="k1")
