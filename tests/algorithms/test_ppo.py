import math
from inspect import unwrap

import pytest
import torch

from hybridflow.algorithms import PolicyLoss, ppo_policy_loss
from hybridflow.errors import AlgorithmError

NAN, INF = float("nan"), float("inf")


def reference_ppo(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """Compute the loss and its derivative with respect to the log-prob, in the form of the papers."""
    clipped_ratio = min(max(ratio, 1 - low), 1 + high)
    objective, slope = clipped_ratio * advantage, 0.0
    if ratio * advantage <= objective:
        objective, slope = ratio * advantage, ratio * advantage
    if dual is not None and advantage < 0 and dual * advantage > objective:
        objective, slope = dual * advantage, 0.0
    return -objective, -slope


def loss_of(
    ratios: list[float], advantages: list[float], low: float = 0.2, high: float = 0.3, dual: float | None = 3.0
) -> tuple[PolicyLoss, list[float]]:
    log_probs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    loss = ppo_policy_loss(
        log_probs=log_probs,
        old_log_probs=torch.zeros_like(log_probs),
        advantages=torch.tensor([advantages], dtype=torch.float64),
        response_mask=torch.ones(1, len(ratios), dtype=torch.bool),
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_dual=dual,
    )
    loss.token_losses.sum().backward()
    assert log_probs.grad is not None
    return loss, log_probs.grad[0].tolist()


def test_a_positive_advantage_is_clipped_from_above():
    loss, grad = loss_of([0.5, 1.0, 1.25, 2.0], [2.0, 2.0, 2.0, 2.0])
    assert loss.token_losses[0].tolist() == pytest.approx([-1, -2, -2.5, -2.6])
    assert grad == pytest.approx([-1, -2, -2.5, 0])
    assert loss.clipped.tolist() == [[False, False, False, True]]
    assert not loss.clipped_dual.any()


def test_a_negative_advantage_is_clipped_from_below_and_by_the_dual_clip():
    loss, grad = loss_of([0.5, 1.0, 2.5, 4.0], [-2.0, -2.0, -2.0, -2.0])
    assert loss.token_losses[0].tolist() == pytest.approx([1.6, 2, 5, 6])
    assert grad == pytest.approx([0, 2, 5, 0])
    assert loss.clipped.tolist() == [[True, False, False, False]]
    assert loss.clipped_dual.tolist() == [[False, False, False, True]]


def test_without_the_dual_clip_a_negative_advantage_has_no_bound():
    loss, grad = loss_of([4.0], [-2.0], dual=None)
    assert loss.token_losses.item() == pytest.approx(8)
    assert grad == pytest.approx([8])
    assert not loss.clipped_dual.any()


def test_an_advantage_of_zero_has_no_loss_and_no_gradient():
    loss, grad = loss_of([0.1, 1.0, 9.0], [0.0, 0.0, 0.0])
    assert loss.token_losses.tolist() == [[0, 0, 0]]
    assert grad == [0, 0, 0]
    assert not loss.clipped.any()


def test_the_ratio_is_reported_without_gradient():
    loss, _ = loss_of([0.5, 4.0], [1.0, 1.0])
    assert loss.ratio[0].tolist() == pytest.approx([0.5, 4])
    assert not loss.ratio.requires_grad


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_flows(low, high, dtype):
    log_probs = -torch.rand(3, 5, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 30
    advantages = torch.tensor([[1.5], [-0.25], [1e-3]], dtype=dtype)
    leaf = log_probs.clone().requires_grad_()
    loss = ppo_policy_loss(
        log_probs=leaf,
        old_log_probs=log_probs,
        advantages=advantages,
        response_mask=torch.ones(3, 5, dtype=torch.bool),
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_dual=3.0,
    )
    assert torch.equal(loss.ratio, torch.ones(3, 5, dtype=dtype))
    assert torch.equal(loss.token_losses, (-advantages).expand(3, 5))
    assert not loss.clipped.any()
    loss.token_losses.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, (-advantages).expand(3, 5))


def test_equals_the_scalar_reference_on_ragged_batches(ragged_batches):
    for i, (mask, (log_probs, old_log_probs, advantages)) in enumerate(ragged_batches(3)):
        low, high, dual = [(0.2, 0.2, 3.0), (0.2, 0.28, None), (0.0, 1.0, 1.1), (1.0, 0.0, 3.0)][i % 4]
        leaf = torch.tensor(log_probs, dtype=torch.float64).requires_grad_()
        loss = ppo_policy_loss(
            log_probs=leaf,
            old_log_probs=torch.tensor(old_log_probs, dtype=torch.float64),
            advantages=torch.tensor(advantages, dtype=torch.float64),
            response_mask=torch.tensor(mask, dtype=torch.bool),
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_dual=dual,
        )
        loss.token_losses.sum().backward()
        assert leaf.grad is not None
        for row, valid in enumerate(mask):
            for t, is_valid in enumerate(valid):
                expected = expected_slope = 0.0
                if is_valid:
                    ratio = math.exp(log_probs[row][t] - old_log_probs[row][t])
                    expected, expected_slope = reference_ppo(ratio, advantages[row][t], low, high, dual)
                assert loss.token_losses[row, t].item() == pytest.approx(expected, rel=1e-12)
                assert leaf.grad[row, t].item() == pytest.approx(expected_slope, rel=1e-12)
                is_clipped = bool(loss.clipped[row, t] | loss.clipped_dual[row, t])
                assert is_clipped == (is_valid and expected_slope == 0)


def test_one_advantage_per_row_equals_its_repetition():
    generator = torch.Generator().manual_seed(1)
    log_probs, old_log_probs = torch.randn(2, 2, 4, generator=generator)
    response_mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    per_row = torch.tensor([[0.5], [-2.0]])
    narrow, wide = (
        ppo_policy_loss(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=advantages,
            response_mask=response_mask,
            clip_ratio_low=0.2,
            clip_ratio_high=0.2,
            clip_ratio_dual=3.0,
        )
        for advantages in (per_row, per_row.expand(2, 4))
    )
    assert torch.equal(narrow.token_losses, wide.token_losses)
    assert torch.equal(narrow.clipped, wide.clipped)


def test_masked_nan_reaches_neither_loss_nor_gradient():
    log_probs = torch.tensor([[-1.0, NAN, -INF]], requires_grad=True)
    loss = ppo_policy_loss(
        log_probs=log_probs,
        old_log_probs=torch.tensor([[-1.0, NAN, INF]]),
        advantages=torch.tensor([[1.0, NAN, NAN]]),
        response_mask=torch.tensor([[True, False, False]]),
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_dual=None,
    )
    loss.token_losses.sum().backward()
    assert loss.token_losses.tolist() == [[-1, 0, 0]]
    assert loss.ratio.tolist() == [[1, 1, 1]]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1, 0, 0]]


@pytest.mark.parametrize("dual", [3.0, None])
def test_a_huge_ratio_keeps_loss_and_gradient_finite(dual):
    log_probs = torch.tensor([[0.0, 0.0, -500.0]], requires_grad=True)
    loss = ppo_policy_loss(
        log_probs=log_probs,
        old_log_probs=torch.tensor([[-500.0, -500.0, 0.0]]),
        advantages=torch.tensor([[1.0, -1.0, -1.0]]),
        response_mask=torch.tensor([[True, True, True]]),
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_dual=dual,
    )
    loss.token_losses.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[0, 0, 0]]
    assert loss.token_losses.isfinite().all()


SETTINGS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_dual": 3.0}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"clip_ratio_low": 1.5}, r"clip_ratio_low=1\.5 is out of range"),
        ({"clip_ratio_high": -0.1}, r"clip_ratio_high=-0\.1 is out of range"),
        ({"clip_ratio_dual": 1.0}, r"clip_ratio_dual=1\.0 is out of range; it must be a number above 1"),
    ],
)
def test_clip_ratios_out_of_range_are_rejected(setting, message):
    column, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(AlgorithmError, match=message):
        ppo_policy_loss(
            log_probs=column, old_log_probs=column, advantages=column, response_mask=mask, **{**SETTINGS, **setting}
        )


def test_columns_of_different_shapes_name_both_shapes():
    raw = unwrap(ppo_policy_loss)
    good, bad, mask = torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(AlgorithmError, match=r"old_log_probs has shape \(2, 4\), but log_probs has shape \(2, 3\)"):
        raw(log_probs=good, old_log_probs=bad, advantages=good, response_mask=mask, **SETTINGS)
    with pytest.raises(AlgorithmError, match=r"advantages has shape \(2, 4\), but log_probs has shape \(2, 3\)"):
        raw(log_probs=good, old_log_probs=good, advantages=bad, response_mask=mask, **SETTINGS)
    with pytest.raises(AlgorithmError, match=r"advantages has shape \(2,\)"):
        raw(log_probs=good, old_log_probs=good, advantages=bad[:, 0], response_mask=mask, **SETTINGS)
    with pytest.raises(AlgorithmError, match=r"response_mask is torch\.int64"):
        raw(log_probs=good, old_log_probs=good, advantages=good, response_mask=mask.long(), **SETTINGS)
