import math

import pytest
import torch

from hybridflow.workers.log_prob_mismatch import KL, MEAN, SHARE, log_prob_mismatch_of


def test_values_are_those_of_each_token():
    values = log_prob_mismatch_of(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]))
    assert values[MEAN].tolist() == [[0.5, 0.0]]
    assert values[SHARE].tolist() == [[1.0, 0.0]]
    assert values[KL][0, 0].item() == pytest.approx(math.exp(0.5) - 1 - 0.5)
    assert values[KL][0, 1].item() == 0.0


def test_the_kl_of_a_huge_mismatch_is_finite():
    values = log_prob_mismatch_of(torch.tensor([[0.0]]), torch.tensor([[-1000.0]]))
    assert values[MEAN].item() == 1000.0
    assert values[KL].item() == pytest.approx(math.exp(20) - 21)
