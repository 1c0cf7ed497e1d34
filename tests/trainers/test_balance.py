from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.models.model_sizes import DecoderShape, sequence_costs
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


@pytest.mark.parametrize(
    ("lengths", "group_size", "shares", "parts"),
    [
        ([9, 8, 2, 1], 1, None, [[0, 3], [1, 2]]),
        ([9, 9, 8, 8, 2, 2, 1, 1], 2, None, [[0, 1, 6, 7], [2, 3, 4, 5]]),  # groups stay on one rank
        ([9, 2, 2, 2, 3], 1, None, [[2, 3, 4], [0, 1]]),  # the first ranks get the longer parts, as in dispatch
        ([5, 5, 5, 5], 1, [0.999, 0.001], [[0, 1, 2], [3]]),  # a very slow rank keeps a row
        ([5, 5, 5, 5], 2, [0.999, 0.001], [[0, 1], [2, 3]]),
        ([5, 4], 1, [0.5, 0.3, 0.2], [[0], [1], []]),  # fewer rows than ranks
    ],
)
def test_rows_are_split_over_ranks_by_cost_groups_and_shares(lengths, group_size, shares, parts):
    rows, options = [[100 + row for row in range(len(lengths))]], {"keep_groups": group_size > 1, "shares": shares}
    order, sizes, metrics = balanced_order(batch_of(lengths, group_size), len(parts), rows, list, **options)
    assert [sorted(part.tolist()) for part in torch.tensor(order).split(sizes)] == parts
    if lengths == [9, 8, 2, 1]:
        assert (metrics["balance/imbalance_before"], metrics["balance/imbalance_after"]) == (pytest.approx(0.7), 0)


def test_parts_of_ranks_with_shares_have_costs_in_proportion():
    lengths = [9, 8, 8, 7, 6, 6, 5, 4, 3, 3, 2, 2]
    order, sizes, metrics = balanced_order(batch_of(lengths), 2, [list(range(100, 112))], list, shares=[0.75, 0.25])
    parts = torch.tensor(order).split(sizes)
    costs = [sum(lengths[row] for row in part.tolist()) for part in parts]
    assert costs == [pytest.approx(0.75 * sum(lengths), abs=2), pytest.approx(0.25 * sum(lengths), abs=2)]
    assert metrics["balance/imbalance_after"] < 0.05 < metrics["balance/imbalance_before"]


def test_each_mini_batch_is_split_by_the_shares():
    lengths = [8] * 4 + [2] * 8
    steps = [[100, 101, 102, 103], list(range(104, 112))]
    order, sizes, _ = balanced_order(batch_of(lengths), 2, steps, list, shares=[0.75, 0.25])
    first, second = torch.tensor(order).split(sizes)
    assert [len([row for row in part.tolist() if row < 4]) for part in (first, second)] == [3, 1]
    assert [len([row for row in part.tolist() if row >= 4]) for part in (first, second)] == [6, 2]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.data())
def test_each_mini_batch_is_split_and_all_rows_are_kept(data):
    """Compare costs of ranks with the bound of a greedy split: no rank exceeds the mean by more than a row."""
    num_ranks, num_steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=num_ranks * num_steps, max_size=24))
    steps = [[100 + row for row in range(step, len(lengths), num_steps)] for step in range(num_steps)]
    order, sizes, metrics = balanced_order(
        batch_of(lengths), num_ranks, steps, data.draw(st.sampled_from([list, partial(sequence_costs, SHAPE)]))
    )
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert metrics["balance/imbalance_after"] >= -1e-9
    for step in steps:
        of_step = {row - 100 for row in step}
        counts = [len(of_step & set(part.tolist())) for part in torch.tensor(order).split(sizes)]
        assert max(counts) - min(counts) <= 1
