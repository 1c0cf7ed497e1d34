"""Advantages with numbers computed by hand; test_against_references.py has random batches."""

import math

import pytest
import torch

from hybridflow.algorithms import (
    gae_advantages,
    grpo_advantages,
)

NAN = float("nan")


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
