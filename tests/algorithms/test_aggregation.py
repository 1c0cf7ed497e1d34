import math
import random
from inspect import unwrap

import pytest
import torch

from hybridflow.algorithms import AGGREGATIONS, aggregate_loss
from hybridflow.algorithms.aggregation import count_of
from hybridflow.errors import AlgorithmError

NAN = float("nan")
LOSSES = torch.tensor([[1.0, 2.0, 6.0], [8.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
DIVIDED = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
"""Modes that divide by a count of the mini-batch."""
MODES = ["token-sum", *DIVIDED]


def reference_aggregate(losses: list[list[float]], mask: list[list[bool]], mode: str) -> float:
    """Aggregate a whole batch by the definition of the mode."""
    rows = [
        [loss for loss, valid in zip(row, valids, strict=True) if valid]
        for row, valids in zip(losses, mask, strict=True)
    ]
    rows = [row for row in rows if row]
    tokens = [loss for row in rows for loss in row]
    if not tokens:
        return 0.0
    if mode in ("token-mean", "token-sum"):
        return math.fsum(tokens) / (len(tokens) if mode == "token-mean" else 1)
    of_rows = [math.fsum(row) / (len(row) if mode == "seq-mean-token-mean" else 1) for row in rows]
    return math.fsum(of_rows) / len(of_rows)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 17 / 4), ("token-sum", 17), ("seq-mean-token-sum", 17 / 2), ("seq-mean-token-mean", 11 / 2)],
)
def test_aggregations_of_two_sequences_by_hand(mode, expected):
    assert aggregate_loss(LOSSES, MASK, mode, num_tokens=4, num_sequences=2).item() == expected


def test_the_table_has_four_modes_and_dr_grpo():
    assert set(AGGREGATIONS) == {*MODES, "seq-mean-token-sum-norm"}


def test_dr_grpo_divides_by_the_maximum_length():
    loss = aggregate_loss(LOSSES, MASK, "seq-mean-token-sum-norm", num_tokens=4, num_sequences=2, max_response_length=5)
    whole = aggregate_loss(LOSSES, MASK, "seq-mean-token-sum", num_tokens=4, num_sequences=2)
    assert loss.item() == pytest.approx(whole.item() / 5)
    with pytest.raises(AlgorithmError, match="max_response_length=None is not valid"):
        aggregate_loss(LOSSES, MASK, "seq-mean-token-sum-norm", num_tokens=4, num_sequences=2)


@pytest.mark.parametrize("mode", MODES)
def test_equals_the_scalar_reference_on_ragged_batches(mode, ragged_batches):
    for mask, (losses,) in ragged_batches(1):
        loss = aggregate_loss(
            torch.tensor(losses, dtype=torch.float64),
            torch.tensor(mask, dtype=torch.bool),
            mode,
            num_tokens=sum(map(sum, mask)),
            num_sequences=sum(map(any, mask)),
        )
        assert loss.item() == pytest.approx(reference_aggregate(losses, mask, mode), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_of_parts_add_up_to_the_whole(mode, ragged_batches):
    rng = random.Random(0)
    for mask_rows, (loss_rows,) in ragged_batches(1):
        mask = torch.tensor(mask_rows, dtype=torch.bool)
        counts = {"num_tokens": int(mask.sum()), "num_sequences": int(mask.any(1).sum())}
        whole_leaf = torch.tensor(loss_rows, dtype=torch.float64).requires_grad_()
        whole = aggregate_loss(whole_leaf, mask, mode, **counts)
        whole.backward()

        order = list(range(len(mask)))
        rng.shuffle(order)
        cut = rng.randint(0, len(order))
        leaf = torch.tensor(loss_rows, dtype=torch.float64).requires_grad_()
        total = 0.0
        for rows in (order[:cut], order[cut:]):
            places = mask[rows].any(0).nonzero()
            stop = int(places.max()) + 1 if len(places) else 0  # a part may be narrower than the whole
            part = aggregate_loss(leaf[rows, :stop], mask[rows, :stop], mode, **counts)
            part.backward()
            total += part.item()
        assert total == pytest.approx(whole.item(), rel=1e-12, abs=1e-14)
        assert leaf.grad is not None
        assert whole_leaf.grad is not None
        torch.testing.assert_close(leaf.grad, whole_leaf.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("counts", [(4, 2), (400, 20)])
def test_token_sum_and_its_gradient_are_divided_by_nothing(counts):
    leaf = LOSSES.double().requires_grad_()
    loss = aggregate_loss(leaf, MASK, "token-sum", num_tokens=counts[0], num_sequences=counts[1])
    loss.backward()
    assert loss.item() == 1 + 2 + 6 + 8
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert count_of("token-sum", *counts) == 1


@pytest.mark.parametrize("mode", DIVIDED)
def test_local_counts_change_the_result(mode):
    whole = aggregate_loss(LOSSES, MASK, mode, num_tokens=4, num_sequences=2).item()
    local = sum(
        aggregate_loss(
            LOSSES[row : row + 1], MASK[row : row + 1], mode, num_tokens=int(MASK[row].sum()), num_sequences=1
        ).item()
        for row in range(2)
    )
    assert local != pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_a_fully_masked_batch_has_loss_zero_and_a_gradient_of_zeros(mode):
    leaf = LOSSES.clone().requires_grad_()
    loss = aggregate_loss(leaf, torch.zeros_like(MASK), mode, num_tokens=0, num_sequences=0)
    loss.backward()
    assert loss.item() == 0
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[0, 0, 0]] * 3


@pytest.mark.parametrize("mode", MODES)
def test_a_part_without_rows_contributes_zero(mode):
    leaf = torch.zeros(0, 3, requires_grad=True)
    loss = aggregate_loss(leaf, torch.zeros(0, 3, dtype=torch.bool), mode, num_tokens=5, num_sequences=2)
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("mode", MODES)
def test_right_padding_does_not_change_the_loss(mode):
    counts = {"num_tokens": 4, "num_sequences": 2}
    padded_losses = torch.cat([LOSSES, torch.full((3, 2), NAN)], dim=1)
    padded_mask = torch.cat([MASK, torch.zeros(3, 2, dtype=torch.bool)], dim=1)
    assert aggregate_loss(padded_losses, padded_mask, mode, **counts).item() == pytest.approx(
        aggregate_loss(LOSSES, MASK, mode, **counts).item()
    )


def test_counts_smaller_than_the_part_are_rejected():
    with pytest.raises(AlgorithmError, match="num_tokens=3, but this part alone has 4"):
        aggregate_loss(LOSSES, MASK, "token-mean", num_tokens=3, num_sequences=2)
    with pytest.raises(AlgorithmError, match="num_sequences=1, but this part alone has 2"):
        aggregate_loss(LOSSES, MASK, "token-mean", num_tokens=4, num_sequences=1)


def test_wrong_shapes_modes_and_counts_are_rejected():
    with pytest.raises(
        AlgorithmError, match="no mode 'mean'; valid are 'token-mean', 'token-sum', 'seq-mean-token-sum'"
    ):
        aggregate_loss(LOSSES, MASK, "mean", num_tokens=4, num_sequences=2)
    raw = unwrap(aggregate_loss)
    with pytest.raises(AlgorithmError, match=r"response_mask has shape \(3, 2\), but token_losses has shape \(3, 3\)"):
        raw(LOSSES, MASK[:, :2], "token-mean", num_tokens=4, num_sequences=2)
    with pytest.raises(AlgorithmError, match=r"num_tokens=4\.0 is not valid"):
        raw(LOSSES, MASK, "token-mean", num_tokens=4.0, num_sequences=2)
    with pytest.raises(AlgorithmError, match="num_sequences=-2"):
        raw(LOSSES, MASK, "token-mean", num_tokens=4, num_sequences=-2)
