"""Advantages and statistics with numbers computed by hand; test_against_references.py has random batches."""

import math

import pytest
import torch

from hybridflow.algorithms import (
    gae_advantages,
    grpo_advantages,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)

NAN = float("nan")
VALUES = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def grpo(scores, group_ids, norm_by_std=True, **settings):
    columns = {"scores": torch.tensor(scores), "group_ids": torch.tensor(group_ids)}
    advantages, returns = grpo_advantages(**columns, norm_by_std=norm_by_std, **settings)
    assert advantages.shape == returns.shape == (len(scores), 1)
    return advantages[:, 0].tolist()


def test_a_fully_masked_batch_gives_zeros():
    columns = {"token_level_rewards": [[1.0, NAN]], "values": [[NAN, 2.0]], "response_mask": [[False, False]]}
    tensors = {name: torch.tensor(column) for name, column in columns.items()}
    advantages, returns = gae_advantages(**tensors, gamma=1.0, lam=1.0, whiten_advantages=True)
    assert advantages.tolist() == returns.tolist() == [[0, 0]]


def test_grpo_of_two_groups_by_hand():
    # group 7: mean 1, deviations -1 0 1, sample std 1;  group -3: mean 2, deviations -1 1, sample std sqrt 2
    scores, group_ids, root = [0.0, 1.0, 1.0, 3.0, 2.0], [7, -3, 7, -3, 7], math.sqrt(2)
    assert grpo(scores, group_ids) == pytest.approx([-1, -1 / root, 0, 1 / root, 1], abs=2e-6)
    assert grpo(scores, group_ids, norm_by_std=False) == [-1, -1, 0, 1, 1]
    assert grpo([0.0, 2.0, 1.0], [0, 0, 0], epsilon=1.0) == [-0.5, 0.5, 0]
    assert grpo([5.0, 1.0, 3.0], [0, 1, 1], norm_by_std=False) == [0, -1, 1]


@pytest.mark.parametrize("epsilon", [1e-6, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_without_variance_has_advantage_exactly_zero(epsilon, dtype):
    for size in (1, 2, 3, 7, 10):
        scores, group_ids = torch.full((size,), 0.1, dtype=dtype), torch.full((size,), 2**40)
        advantages, _ = grpo_advantages(scores=scores, group_ids=group_ids, norm_by_std=True, epsilon=epsilon)
        assert advantages.tolist() == [[0]] * size


def test_results_are_bit_identical_for_every_row_order():
    generator = torch.Generator().manual_seed(3)
    scores, group_ids = torch.randn(64, generator=generator), torch.randint(0, 9, (64,), generator=generator)
    advantages, _ = grpo_advantages(scores=scores, group_ids=group_ids, norm_by_std=True)
    for _ in range(20):
        order = torch.randperm(64, generator=generator)
        permuted, _ = grpo_advantages(scores=scores[order], group_ids=group_ids[order], norm_by_std=True)
        assert torch.equal(permuted, advantages[order])


# Statistics over a mask


def test_sum_mean_and_variance_of_three_values():
    assert masked_sum(VALUES, MASK).item() == 9
    assert masked_mean(VALUES, MASK).item() == 3
    assert masked_var(VALUES, MASK).item() == (4 + 1 + 9) / 2
    assert masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(14 / 3)
    assert masked_sum(VALUES, MASK, dim=1).tolist() == [3, 6]
    assert masked_mean(VALUES, MASK, dim=1).tolist() == [1.5, 6]
    assert masked_mean(VALUES, MASK, dim=0).tolist() == [3.5, 2, 0]


@pytest.mark.parametrize(("shift_mean", "mean"), [(True, 0), (False, 3)])
def test_whitened_values_have_variance_one_and_may_keep_the_mean(shift_mean, mean):
    whitened, scale = masked_whiten(VALUES, MASK, shift_mean=shift_mean), math.sqrt(7)
    assert whitened.tolist()[0] == pytest.approx([mean - 2 / scale, mean - 1 / scale, 0])
    assert whitened.tolist()[1] == pytest.approx([mean + 3 / scale, 0, 0])


def test_one_value_per_row_applies_to_all_unmasked_positions():
    per_row = torch.tensor([[1.0], [4.0]])
    assert (masked_sum(per_row, MASK).item(), masked_mean(per_row, MASK).item()) == (6, 2)
    assert masked_whiten(per_row, MASK).shape == (2, 3)


@pytest.mark.parametrize(("values", "mask"), [(VALUES, torch.zeros_like(MASK)), (torch.zeros(2, 0), MASK[:, :0])])
def test_no_values_give_zeros(values, mask):
    assert [function(values, mask).item() for function in (masked_sum, masked_mean, masked_var)] == [0, 0, 0]
    assert masked_mean(values, mask, dim=1).tolist() == [0, 0]
    assert masked_whiten(values, mask).tolist() == torch.zeros(values.shape).tolist()


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
