import math

import pytest
import torch

from hybridflow.models.kernels.sampling import block_sums


def test_sums_of_blocks_are_relative_to_their_largest_logit():
    logits = torch.log(torch.tensor([[1.0, 2.0, 4.0, 8.0, 3.0], [1.0, 4.0, 0.0, 0.0, 9.0]], dtype=torch.float64))
    largest, sums = block_sums(logits, torch.tensor([1.0, 0.5], dtype=torch.float64), 2)
    assert largest[0].exp().tolist() == pytest.approx([2, 8, 3])
    assert sums[0].tolist() == pytest.approx([1.5, 1.5, 1])
    assert largest[1].exp().tolist() == pytest.approx([16, 0, 81])  # at temperature 0.5 probabilities are squared
    assert sums[1].tolist() == pytest.approx([17 / 16, 0, 1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sum_of_a_block_with_a_non_finite_logit_is_nan(bad):
    logits = torch.tensor([[0.0, 0.0, bad, 0.0]])
    _, sums = block_sums(logits, torch.ones(1, dtype=torch.float64), 2)
    assert sums.isnan().tolist() == [[False, True]]
