import math
import random
from inspect import unwrap

import pytest
import torch

from hybridflow.algorithms import grpo_advantages
from hybridflow.errors import AlgorithmError


def reference_grpo(scores: list[float], group_ids: list[int], norm_by_std: bool, epsilon: float) -> list[float]:
    """Compute the paper's formula row by row, with the sample standard deviation."""
    advantages = []
    for score, group in zip(scores, group_ids, strict=True):
        of_group = [s for s, g in zip(scores, group_ids, strict=True) if g == group]
        mean = math.fsum(of_group) / len(of_group)
        if len(of_group) == 1 or min(of_group) == max(of_group):
            advantages.append(0.0)
        elif norm_by_std:
            std = math.sqrt(math.fsum((s - mean) ** 2 for s in of_group) / (len(of_group) - 1))
            advantages.append((score - mean) / (std + epsilon))
        else:
            advantages.append(score - mean)
    return advantages


def advantages_of(scores: list[float], group_ids: list[int], norm_by_std: bool = True, **settings) -> list[float]:
    advantages, returns = grpo_advantages(
        scores=torch.tensor(scores), group_ids=torch.tensor(group_ids), norm_by_std=norm_by_std, **settings
    )
    assert advantages.shape == returns.shape == (len(scores), 1)
    assert torch.equal(advantages, returns)
    return advantages[:, 0].tolist()


def test_two_groups_by_hand():
    # group 7: mean 1, deviations -1 0 1, sample std 1;  group -3: mean 2, deviations -1 1, sample std sqrt 2
    advantages = advantages_of([0.0, 1.0, 1.0, 3.0, 2.0], [7, -3, 7, -3, 7])
    root = math.sqrt(2)
    assert advantages == pytest.approx([-1, -1 / root, 0, 1 / root, 1], abs=2e-6)


def test_without_std_the_advantage_is_the_deviation_from_the_mean():
    assert advantages_of([0.0, 1.0, 1.0, 3.0, 2.0], [7, -3, 7, -3, 7], norm_by_std=False) == [-1, -1, 0, 1, 1]


def test_epsilon_is_added_to_the_standard_deviation():
    assert advantages_of([0.0, 2.0, 1.0], [0, 0, 0], epsilon=1.0) == [-0.5, 0.5, 0]


def test_a_group_of_one_has_advantage_zero():
    assert advantages_of([5.0, 1.0, 3.0], [0, 1, 1], norm_by_std=False) == [0, -1, 1]
    assert advantages_of([5.0], [0]) == [0]


@pytest.mark.parametrize("epsilon", [1e-6, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_without_variance_has_advantage_exactly_zero(epsilon, dtype):
    for size in (2, 3, 7, 10):
        advantages, _ = grpo_advantages(
            scores=torch.full((size,), 0.1, dtype=dtype),
            group_ids=torch.full((size,), 2**40),
            norm_by_std=True,
            epsilon=epsilon,
        )
        assert advantages.tolist() == [[0]] * size


def test_equals_the_scalar_reference_on_random_groups():
    rng = random.Random(0)
    for _ in range(200):
        num_rows = rng.randint(1, 12)
        group_ids = [rng.choice([-(2**62), -1, 0, 5, 2**62]) for _ in range(num_rows)]
        scores = [rng.choice([0.0, 0.1, 1.0, rng.gauss(0, 3)]) for _ in range(num_rows)]
        for norm_by_std in (True, False):
            advantages, _ = grpo_advantages(
                scores=torch.tensor(scores, dtype=torch.float64),
                group_ids=torch.tensor(group_ids),
                norm_by_std=norm_by_std,
            )
            expected = reference_grpo(scores, group_ids, norm_by_std, 1e-6)
            assert advantages[:, 0].tolist() == pytest.approx(expected, rel=1e-11, abs=1e-11)


def test_results_are_bit_identical_for_every_row_order():
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(64, generator=generator)
    group_ids = torch.randint(0, 9, (64,), generator=generator)
    advantages, _ = grpo_advantages(scores=scores, group_ids=group_ids, norm_by_std=True)
    for _ in range(20):
        order = torch.randperm(64, generator=generator)
        permuted, _ = grpo_advantages(scores=scores[order], group_ids=group_ids[order], norm_by_std=True)
        assert torch.equal(permuted, advantages[order])


def test_a_group_does_not_depend_on_other_groups():
    alone = advantages_of([0.0, 1.0, 0.25], [4, 4, 4])
    assert advantages_of([0.0, 9.0, 1.0, 0.25, -9.0], [4, 1, 4, 4, 1])[:3:2] == alone[:2]


def test_returns_do_not_share_memory_with_advantages():
    advantages, returns = grpo_advantages(
        scores=torch.tensor([0.0, 1.0]), group_ids=torch.tensor([0, 0]), norm_by_std=False
    )
    advantages.zero_()
    assert returns.tolist() == [[-0.5], [0.5]]


def test_no_rows_give_no_advantages():
    advantages, returns = grpo_advantages(
        scores=torch.zeros(0), group_ids=torch.zeros(0, dtype=torch.int64), norm_by_std=True
    )
    assert advantages.shape == returns.shape == (0, 1)


def test_a_non_finite_score_is_rejected():
    with pytest.raises(AlgorithmError, match=r"scores\[1\]=nan is not finite.*group_ids\[1\]=8"):
        advantages_of([0.0, float("nan")], [8, 8])


def test_wrong_shapes_types_and_ranges_are_rejected():
    raw = unwrap(grpo_advantages)
    with pytest.raises(AlgorithmError, match=r"group_ids has shape \(3,\), but scores has shape \(2,\)"):
        raw(scores=torch.zeros(2), group_ids=torch.zeros(3, dtype=torch.int64), norm_by_std=True)
    with pytest.raises(AlgorithmError, match=r"scores has shape \(2, 1\); it must be \(batch\)"):
        raw(scores=torch.zeros(2, 1), group_ids=torch.zeros(2, 1, dtype=torch.int64), norm_by_std=True)
    with pytest.raises(AlgorithmError, match=r"group_ids is torch\.float32"):
        raw(scores=torch.zeros(2), group_ids=torch.zeros(2), norm_by_std=True)
    with pytest.raises(AlgorithmError, match="epsilon=-1"):
        raw(scores=torch.zeros(2), group_ids=torch.zeros(2, dtype=torch.int64), norm_by_std=True, epsilon=-1)
