import pytest
import torch

from hybridflow.engines.micro_batches import plan_micro_batches, spread_micro_batches
from hybridflow.errors import BatchError


def planned(lengths: list[int], max_tokens: int, *, packing: bool) -> list[list[int]]:
    return [rows.tolist() for rows in plan_micro_batches(torch.tensor(lengths), max_tokens, packing=packing)]


def test_packed_lengths_add_up_to_at_most_the_budget():
    assert planned([4, 2, 3, 5], 9, packing=True) == [[1, 2, 0], [3]]


def test_padded_rows_count_as_the_longest_row():
    assert planned([4, 2, 3, 5], 9, packing=False) == [[1, 2], [0], [3]]
    assert planned([4, 2, 3, 5], 20, packing=False) == [[1, 2, 0, 3]]


@pytest.mark.parametrize("packing", [True, False])
def test_every_row_is_planned_once_within_budget(packing):
    lengths = torch.randint(1, 50, (200,), generator=torch.Generator().manual_seed(0))
    for max_tokens in (49, 50, 173, 100_000):
        parts = plan_micro_batches(lengths, max_tokens, packing=packing)
        assert sorted(torch.cat(parts).tolist()) == list(range(200))
        for rows in parts:
            own = lengths[rows]
            assert (int(own.sum()) if packing else len(own) * int(own.max())) <= max_tokens


def test_rows_of_equal_length_are_adjacent_in_order():
    assert planned([2, 1, 2, 1, 2], 100, packing=True) == [[1, 3, 0, 2, 4]]


def test_no_rows_give_no_micro_batches():
    assert plan_micro_batches(torch.zeros(0, dtype=torch.int64), 10, packing=True) == []


def test_row_longer_than_budget_error_names_row_and_fix():
    message = "row 1 has 12 tokens, more than memory.max_tokens_per_micro_batch=10; set it to at least 12"
    with pytest.raises(BatchError, match=message):
        planned([3, 12, 4], 10, packing=True)


def test_row_without_tokens_is_an_error():
    with pytest.raises(BatchError, match="row 2 has no tokens"):
        planned([3, 4, 0], 10, packing=True)


def test_rows_of_one_prompt_are_adjacent_and_count_it_once():
    lengths, families, shared = (torch.tensor(x) for x in ([7, 5, 6, 9, 6], [0, 1, 0, 1, 2], [4, 4, 4, 4, 5]))
    arguments = {"packing": True, "families": families, "shared": shared}

    def rows(max_tokens: int) -> list[list[int]]:
        return [part.tolist() for part in plan_micro_batches(lengths, max_tokens, **arguments)]

    assert rows(100) == [[4, 2, 0, 1, 3]]  # families in order of their longest row
    assert rows(15) == [[4, 2, 0], [1, 3]]  # 6 + 6 + 3 and 5 + 5
    assert rows(14) == [[4, 2], [0, 1], [3]]  # a prompt is computed again if its rows are in different micro-batches


def test_rows_of_different_prompts_ignore_families():
    lengths = torch.randint(1, 9, (50,), generator=torch.Generator().manual_seed(0))
    alone = plan_micro_batches(lengths, 20, packing=True, families=torch.arange(50), shared=lengths - 1)
    assert [part.tolist() for part in alone] == planned(lengths.tolist(), 20, packing=True)


def spread(lengths, count, max_tokens, **options):
    lengths, options = torch.tensor(lengths), {"packing": True, **options}
    plan = plan_micro_batches(lengths, max_tokens, **options)
    return spread_micro_batches(plan, count, lengths, lengths.tolist(), max_tokens, **options)


def test_micro_batches_have_similar_cost_in_descending_order():
    parts = spread([9, 8, 2, 1, 5], 3, 12)
    sums = [sum([9, 8, 2, 1, 5][row] for row in part) for part in parts]
    assert sums == sorted(sums, reverse=True) == [9, 8, 8]


def test_rank_with_too_few_rows_has_empty_micro_batches_last():
    parts = spread([3, 4], 4, 10)
    assert [len(part) for part in parts] == [1, 1, 0, 0]
    assert [len(part) for part in spread_micro_batches([], 2, torch.tensor([]), [], 10, packing=True)] == [0, 0]


def test_plan_is_halved_if_balancing_exceeds_budget():
    lengths = [6, 6, 4, 4, 4]
    for count in (3, 4, 5):
        parts = spread(lengths, count, 10)
        assert sorted(row for part in parts for row in part.tolist()) == [0, 1, 2, 3, 4]
        assert max(sum(lengths[row] for row in part) for part in parts) <= 10
        assert len(parts) == count


def test_padded_micro_batches_group_similar_lengths():
    parts = spread([1, 9, 1, 9], 2, 20, packing=False)
    assert sorted(sorted(part.tolist()) for part in parts) == [[0, 2], [1, 3]]


def test_families_stay_together_and_count_their_prompt_once():
    families, shared = torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 5, 5])
    parts = spread([6, 6, 6, 6], 2, 7, families=families, shared=shared)
    assert sorted(part.tolist() for part in parts) == [[0, 1], [2, 3]]
