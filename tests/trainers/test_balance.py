import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.models import DecoderShape
from hybridflow.protocol import DataProto
from hybridflow.trainers.balance import balanced_order

SHAPE = DecoderShape(2, 32, 48, 4, 2, 40)


def batch_of(lengths, group_size=1):
    """Return rows of one prompt token; the other tokens are the response."""
    lengths = torch.tensor(lengths)
    return DataProto.from_dict(
        {
            "prompt_mask": torch.ones(len(lengths), 1, dtype=torch.bool),
            "response_mask": torch.arange(int(lengths.max())) < lengths[:, None] - 1,
            "group_ids": torch.arange(len(lengths)) // group_size,
            "row_ids": torch.arange(len(lengths)) + 100,
        }
    )


def rows_of_ranks(order, num_parts):
    return [sorted(part.tolist()) for part in torch.tensor(order).chunk(num_parts)]


def test_long_rows_are_spread_over_ranks_with_metrics():
    batch = batch_of([9, 8, 2, 1])
    order, _, metrics = balanced_order(batch, 2, [[100, 101, 102, 103]], None)
    assert sorted(rows_of_ranks(order, 2)) == [[0, 3], [1, 2]]
    assert metrics["balance/imbalance_before"] == pytest.approx(17 / 10 - 1)
    assert metrics["balance/imbalance_after"] == 0


def test_groups_stay_on_one_rank_with_keep_groups():
    lengths = [9, 9, 8, 8, 2, 2, 1, 1]
    order, *_ = balanced_order(batch_of(lengths, group_size=2), 2, [list(range(100, 108))], None, keep_groups=True)
    assert sorted(rows_of_ranks(order, 2)) == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_the_first_ranks_get_the_longer_parts_as_in_dispatch():
    order, _, metrics = balanced_order(batch_of([9, 2, 2, 2, 3]), 2, [list(range(100, 105))], None)
    assert rows_of_ranks(order, 2) == [[2, 3, 4], [0, 1]]
    assert metrics["balance/imbalance_after"] == pytest.approx(11 / 9 - 1)


def test_parts_of_ranks_with_shares_have_costs_in_proportion():
    lengths = [9, 8, 8, 7, 6, 6, 5, 4, 3, 3, 2, 2]
    order, sizes, metrics = balanced_order(batch_of(lengths), 2, [list(range(100, 112))], None, shares=[0.75, 0.25])
    parts = torch.tensor(order).split(sizes)
    costs = [sum(lengths[row] for row in part.tolist()) for part in parts]
    assert costs == [pytest.approx(0.75 * sum(lengths), abs=2), pytest.approx(0.25 * sum(lengths), abs=2)]
    assert metrics["balance/imbalance_after"] < 0.05 < metrics["balance/imbalance_before"]


def test_each_mini_batch_is_split_by_the_shares():
    lengths = [8] * 4 + [2] * 8
    steps = [[100, 101, 102, 103], list(range(104, 112))]
    order, sizes, _ = balanced_order(batch_of(lengths), 2, steps, None, shares=[0.75, 0.25])
    first, second = torch.tensor(order).split(sizes)
    assert [len([row for row in part.tolist() if row < 4]) for part in (first, second)] == [3, 1]
    assert [len([row for row in part.tolist() if row >= 4]) for part in (first, second)] == [6, 2]


def test_a_very_slow_rank_keeps_one_row_or_group():
    _, sizes, _ = balanced_order(batch_of([5, 5, 5, 5]), 2, [list(range(100, 104))], None, shares=[0.999, 0.001])
    assert sizes == [3, 1]
    batch = batch_of([5, 5, 5, 5], group_size=2)
    _, sizes, _ = balanced_order(batch, 2, [list(range(100, 104))], None, keep_groups=True, shares=[0.999, 0.001])
    assert sizes == [2, 2]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.data())
def test_each_mini_batch_is_split_and_all_rows_are_kept(data):
    """Compare costs of ranks with the bound of a greedy split: no rank exceeds the mean by more than a row."""
    num_ranks, num_steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=num_ranks * num_steps, max_size=24))
    steps = [[100 + row for row in range(step, len(lengths), num_steps)] for step in range(num_steps)]
    order, sizes, metrics = balanced_order(
        batch_of(lengths), num_ranks, steps, data.draw(st.sampled_from([None, SHAPE]))
    )
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert metrics["balance/imbalance_after"] >= -1e-9
    for step in steps:
        of_step = {row - 100 for row in step}
        counts = [len(of_step & set(part.tolist())) for part in torch.tensor(order).split(sizes)]
        assert max(counts) - min(counts) <= 1


def test_fewer_rows_than_ranks_leave_parts_empty():
    order, sizes, _ = balanced_order(batch_of([5, 4]), 3, [[100, 101]], None, shares=[0.5, 0.3, 0.2])
    assert sorted(order.tolist()) == [0, 1]
    assert (sum(sizes), sizes.count(0)) == (2, 1)
