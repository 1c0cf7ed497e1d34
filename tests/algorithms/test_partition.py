"""Partitions against the optimum found by exhaustive search, and their guarantees on random costs."""

from inspect import unwrap
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms import balanced_partition, imbalance
from hybridflow.algorithms.partition import proportional_partition
from hybridflow.errors import AlgorithmError


def heaviest(costs, partition):
    return max(sum(costs[item] for item in part) for part in partition)


def optimum(costs, num_parts, equal_counts):
    """Return the smallest cost of the heaviest part over all partitions of the items."""
    best = float("inf")
    for owners in product(range(num_parts), repeat=len(costs)):
        counts = [owners.count(part) for part in range(num_parts)]
        if not equal_counts or max(counts) - min(counts) <= 1:
            best = min(best, max(np.bincount(owners, weights=costs, minlength=num_parts)))
    return best


@pytest.mark.parametrize("equal_counts", [True, False])
def test_small_cases_are_close_to_the_optimum(equal_counts):
    generator, optimal = np.random.default_rng(0), 0
    for _ in range(100):
        costs = generator.integers(1, 30, int(generator.integers(1, 8))).tolist()
        num_parts = int(generator.integers(1, 4))
        ours = heaviest(costs, balanced_partition(costs, num_parts, equal_counts=equal_counts))
        best = optimum(costs, num_parts, equal_counts)
        assert best <= ours <= 1.15 * best
        optimal += ours == best
    assert optimal >= 95


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1e6)), max_size=60), st.integers(1, 9), st.booleans())
def test_every_item_is_in_one_part_and_counts_can_be_equal(costs, num_parts, equal_counts):
    partition = balanced_partition(costs, num_parts, equal_counts=equal_counts)
    shares = [1.0 + number for number in range(num_parts)]
    for parts in (partition, proportional_partition(costs, shares)):
        assert len(parts) == num_parts
        assert sorted(item for part in parts for item in part) == list(range(len(costs)))
        assert all(part == sorted(part) for part in parts)
    assert partition == balanced_partition(list(costs), num_parts, equal_counts=equal_counts)
    if equal_counts:
        assert max(map(len, partition)) - min(map(len, partition)) <= 1


@pytest.mark.parametrize("equal_counts", [True, False])
def test_long_tailed_lengths_are_balanced_to_a_thousandth(equal_counts):
    lengths = np.random.default_rng(1).lognormal(6.5, 1.0, 8192).clip(16, 16384).astype(int).tolist()
    as_they_come = [list(range(start, start + 128)) for start in range(0, 8192, 128)]
    assert imbalance(lengths, as_they_come) > 0.1
    partition = balanced_partition(lengths, 64, equal_counts=equal_counts)
    assert imbalance(lengths, partition) < 1e-3
    assert sorted(item for part in partition for item in part) == list(range(8192))
    shares = [2.0, 1.0, 1.0, 4.0]
    assert imbalance(lengths, proportional_partition(lengths, shares), shares) < 1e-2


def test_imbalance_is_the_excess_of_the_heaviest_part_over_the_mean():
    assert imbalance([1, 3], [[0], [1]]) == 0.5
    assert imbalance([1, 3], [[0], [1]], [1.0, 3.0]) == 0
    assert imbalance([0, 0], [[0], [1]]) == 0
    assert imbalance([3, 3, 3, 3], balanced_partition([3, 3, 3, 3], 2)) == 0
    assert proportional_partition([4, 2, 2, 1], [2.0, 1.0]) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("costs", "num_parts"),
    [
        ([1.0, float("nan")], 2),
        ([float("inf")], 2),
        ([1e308] * 4, 2),
        ([-1.0], 1),
        (["a"], 1),
        ([1.0], 0),
        ([1.0], 2.0),
    ],
)
def test_invalid_costs_and_numbers_of_parts_are_rejected(costs, num_parts):
    with pytest.raises(AlgorithmError, match="balanced_partition"):
        unwrap(balanced_partition)(costs, num_parts)


@pytest.mark.parametrize("costs", [[float("nan")], [-1.0]])
def test_imbalance_rejects_invalid_costs(costs):
    with pytest.raises(AlgorithmError, match="imbalance: costs must be"):
        imbalance(costs, [[0]])
