import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engines.micro_batches import plan_micro_batches, spread_micro_batches
from hybridflow.errors import BatchError


def planned(lengths: list[int], max_tokens: int, *, packing: bool, **options) -> list[list[int]]:
    plan = plan_micro_batches(torch.tensor(lengths, dtype=torch.int64), max_tokens, packing=packing, **options)
    return [rows.tolist() for rows in plan]


def spread(lengths: list[int], count: int, max_tokens: int, **options) -> list[list[int]]:
    """Spread the rows over `count` micro-batches."""
    own, options = torch.tensor(lengths, dtype=torch.int64), {"packing": True, **options}
    plan = plan_micro_batches(own, max_tokens, **options)
    return [part.tolist() for part in spread_micro_batches(plan, count, own, lengths, max_tokens, **options)]


def test_packed_lengths_add_up_to_at_most_the_budget():
    assert planned([4, 2, 3, 5], 9, packing=True) == [[1, 2, 0], [3]]
    assert planned([2, 1, 2, 1, 2], 100, packing=True) == [[1, 3, 0, 2, 4]]  # equal lengths are adjacent, in order


def test_padded_rows_count_as_the_longest_row():
    assert planned([4, 2, 3, 5], 9, packing=False) == [[1, 2], [0], [3]]
    assert planned([4, 2, 3, 5], 20, packing=False) == [[1, 2, 0, 3]]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(50, 300), st.booleans(), st.integers(0, 9))
def test_every_row_is_computed_once_within_budget(lengths, max_tokens, packing, more):
    """Ranks with fewer rows get empty micro-batches: all have equal numbers, or they would wait for one another."""
    plan = planned(lengths, max_tokens, packing=packing)
    count = max(1, len(plan) + more)
    parts = spread(lengths, count, max_tokens, packing=packing)
    assert len(parts) == count
    assert all(plan)
    for found in (plan, parts):
        assert sorted(row for part in found for row in part) == list(range(len(lengths)))
        for own in ([lengths[row] for row in part] for part in found if part):
            assert (sum(own) if packing else len(own) * max(own)) <= max_tokens
    costs = [sum(lengths[row] for row in part) for part in parts]
    assert costs == sorted(costs, reverse=True)


def test_a_row_that_cannot_be_planned_is_an_error():
    message = "row 1 has 12 tokens, more than memory.max_tokens_per_micro_batch=10; set it to at least 12"
    with pytest.raises(BatchError, match=message):
        planned([3, 12, 4], 10, packing=True)
    with pytest.raises(BatchError, match="row 2 has no tokens"):
        planned([3, 4, 0], 10, packing=True)


def test_rows_of_one_prompt_are_adjacent_and_count_it_once():
    families = {"families": torch.tensor([0, 1, 0, 1, 2]), "shared": torch.tensor([4, 4, 4, 4, 5])}
    expected = {
        100: [[4, 2, 0, 1, 3]],  # families in order of their longest row
        15: [[4, 2, 0], [1, 3]],  # 6 + 6 + 3 and 5 + 5
        14: [[4, 2], [0, 1], [3]],  # a prompt is computed again if its rows are in different micro-batches
    }
    for max_tokens, rows in expected.items():
        assert planned([7, 5, 6, 9, 6], max_tokens, packing=True, **families) == rows
    lengths = torch.randint(1, 9, (50,), generator=torch.Generator().manual_seed(0))
    alone = planned(lengths.tolist(), 20, packing=True, families=torch.arange(50), shared=lengths - 1)
    assert alone == planned(lengths.tolist(), 20, packing=True)


def test_micro_batches_have_similar_cost():
    lengths = [9, 8, 2, 1, 5]
    assert [sum(lengths[row] for row in part) for part in spread(lengths, 3, 12)] == [9, 8, 8]
    assert [len(part) for part in spread([3, 4], 4, 10)] == [1, 1, 0, 0]
    parts = spread([1, 9, 1, 9], 2, 20, packing=False)
    assert sorted(sorted(part) for part in parts) == [[0, 2], [1, 3]]  # padded ones have similar lengths
    families = {"families": torch.tensor([0, 0, 1, 1]), "shared": torch.tensor([5, 5, 5, 5])}
    assert sorted(spread([6, 6, 6, 6], 2, 7, **families)) == [[0, 1], [2, 3]]  # each prompt counts once
