from inspect import unwrap

import pytest
import torch

from hybridflow.algorithms import ValueLoss, clipped_value_loss
from hybridflow.errors import AlgorithmError

NAN = float("nan")


def reference_value_loss(new_value: float, value: float, target: float, clip: float) -> tuple[float, float]:
    """Compute the loss and its derivative with respect to the new value."""
    plain = 0.5 * (new_value - target) ** 2
    clipped = 0.5 * (min(max(new_value, value - clip), value + clip) - target) ** 2
    return (clipped, 0.0) if clipped > plain else (plain, new_value - target)


def loss_of(new_values, values, returns, mask, value_clip) -> tuple[ValueLoss, torch.Tensor]:
    leaf = torch.tensor(new_values, dtype=torch.float64).requires_grad_()
    loss = clipped_value_loss(
        new_values=leaf,
        values=torch.tensor(values, dtype=torch.float64),
        returns=torch.tensor(returns, dtype=torch.float64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        value_clip=value_clip,
    )
    loss.token_losses.sum().backward()
    assert leaf.grad is not None
    return loss, leaf.grad


def test_half_the_squared_error_within_the_clip():
    loss, grad = loss_of([[1.0, 1.25]], [[1.0, 1.0]], [[3.0, 0.25]], [[True, True]], value_clip=0.5)
    assert loss.token_losses.tolist() == [[2, 0.5]]
    assert grad.tolist() == [[-2, 1]]
    assert not loss.clipped.any()


def test_a_large_step_toward_the_return_is_clipped():
    # v = 3 is clipped to 1.5: error 2.5 instead of 1
    loss, grad = loss_of([[3.0]], [[1.0]], [[4.0]], [[True]], value_clip=0.5)
    assert loss.token_losses.tolist() == [[3.125]]
    assert grad.tolist() == [[0]]
    assert loss.clipped.tolist() == [[True]]


def test_a_large_step_away_from_the_return_keeps_the_larger_error():
    # v = 3 is clipped to 1.5, with a smaller error: the larger one counts
    loss, grad = loss_of([[3.0]], [[1.0]], [[0.0]], [[True]], value_clip=0.5)
    assert loss.token_losses.tolist() == [[4.5]]
    assert grad.tolist() == [[3]]


def test_equals_the_scalar_reference_on_ragged_batches(ragged_batches):
    for mask, (new_values, values, returns) in ragged_batches(3):
        loss, grad = loss_of(new_values, values, returns, mask, value_clip=0.4)
        for row, valid in enumerate(mask):
            for t, is_valid in enumerate(valid):
                expected = expected_slope = 0.0
                if is_valid:
                    expected, expected_slope = reference_value_loss(
                        new_values[row][t], values[row][t], returns[row][t], 0.4
                    )
                assert loss.token_losses[row, t].item() == pytest.approx(expected, rel=1e-12)
                assert grad[row, t].item() == pytest.approx(expected_slope, rel=1e-12)


def test_masked_nan_reaches_neither_loss_nor_gradient():
    loss, grad = loss_of([[1.0, NAN]], [[1.0, NAN]], [[2.0, NAN]], [[True, False]], value_clip=0.5)
    assert loss.token_losses.tolist() == [[0.5, 0]]
    assert grad.tolist() == [[-1, 0]]


def test_wrong_shapes_and_ranges_are_rejected():
    raw = unwrap(clipped_value_loss)
    good, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(AlgorithmError, match=r"returns has shape \(2, 1\), but new_values has shape \(2, 3\)"):
        raw(new_values=good, values=good, returns=good[:, :1], response_mask=mask, value_clip=0.5)
    with pytest.raises(AlgorithmError, match="value_clip=0 is out of range; it must be a number above 0"):
        raw(new_values=good, values=good, returns=good, response_mask=mask, value_clip=0)
    with pytest.raises(AlgorithmError, match=r"response_mask has shape \(2, 2\)"):
        raw(new_values=good, values=good, returns=good, response_mask=mask[:, :2], value_clip=0.5)
