import math
from inspect import unwrap

import pytest
import torch

from hybridflow.algorithms import masked_mean, masked_sum, masked_var, masked_whiten
from hybridflow.errors import AlgorithmError

NAN = float("nan")
VALUES = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_sum_mean_and_variance_of_three_values():
    assert masked_sum(VALUES, MASK).item() == 9
    assert masked_mean(VALUES, MASK).item() == 3
    assert masked_var(VALUES, MASK).item() == (4 + 1 + 9) / 2
    assert masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(14 / 3)


def test_sum_and_mean_along_an_axis():
    assert masked_sum(VALUES, MASK, dim=1).tolist() == [3, 6]
    assert masked_mean(VALUES, MASK, dim=1).tolist() == [1.5, 6]
    assert masked_mean(VALUES, MASK, dim=0).tolist() == [3.5, 2, 0]


def test_whitened_values_have_mean_zero_and_variance_one():
    whitened = masked_whiten(VALUES, MASK)
    scale = math.sqrt(7)
    assert whitened.tolist()[0] == pytest.approx([-2 / scale, -1 / scale, 0])
    assert whitened.tolist()[1] == pytest.approx([3 / scale, 0, 0])


def test_whitening_can_keep_the_mean():
    whitened = masked_whiten(VALUES, MASK, shift_mean=False)
    scale = math.sqrt(7)
    assert whitened.tolist()[0] == pytest.approx([3 - 2 / scale, 3 - 1 / scale, 0])


def test_one_value_per_row_applies_to_all_unmasked_positions():
    per_row = torch.tensor([[1.0], [4.0]])
    assert masked_sum(per_row, MASK).item() == 6
    assert masked_mean(per_row, MASK).item() == 2
    assert masked_whiten(per_row, MASK).shape == (2, 3)


def test_a_fully_masked_tensor_gives_zeros():
    nothing = torch.zeros_like(MASK)
    assert masked_sum(VALUES, nothing).item() == 0
    assert masked_mean(VALUES, nothing).item() == 0
    assert masked_var(VALUES, nothing).item() == 0
    assert masked_whiten(VALUES, nothing).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_tensor_without_elements_gives_zeros():
    values, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    assert masked_sum(values, mask).item() == 0
    assert masked_mean(values, mask, dim=1).tolist() == [0, 0]
    assert masked_whiten(values, mask).shape == (2, 0)


def test_a_single_value_has_variance_zero_and_whitens_to_zero():
    values, mask = torch.tensor([5.0, NAN]), torch.tensor([True, False])
    assert masked_var(values, mask).item() == 0
    assert masked_whiten(values, mask).tolist() == [0, 0]


def test_masked_values_have_zero_gradient():
    values = VALUES.clone().requires_grad_()
    masked_mean(values, MASK).backward()
    third = torch.tensor(1 / 3).item()
    assert values.grad is not None
    assert values.grad.tolist() == [[third, third, 0], [third, 0, 0]]


def test_a_mask_of_another_shape_names_both_shapes():
    with pytest.raises(AlgorithmError, match=r"masked_mean: mask has shape \(2, 2\), but values has shape \(2, 3\)"):
        unwrap(masked_mean)(VALUES, MASK[:, :2])


def test_a_numeric_mask_is_rejected():
    with pytest.raises(AlgorithmError, match=r"torch\.float32; it must be torch\.bool"):
        unwrap(masked_sum)(VALUES, MASK.float())


def test_integer_values_are_rejected():
    with pytest.raises(AlgorithmError, match=r"torch\.int64; it must be floating point"):
        unwrap(masked_var)(MASK.long(), MASK)
