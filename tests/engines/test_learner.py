import pytest
import torch

from hybridflow.engines.learner import LossShare, add_up, read_numbers


def test_losses_and_metrics_are_summed_and_maxima_combined():
    shares = [
        LossShare(torch.tensor(1.5), {"actor/entropy": torch.tensor(0.25), "rollout/log_prob_mismatch_max": 2.0}),
        LossShare(torch.tensor(-0.5), {}),
        LossShare(torch.tensor(2.0), {"actor/entropy": 0.5, "rollout/log_prob_mismatch_max": torch.tensor(1.0)}),
    ]
    assert add_up(shares) == (3.0, {"actor/entropy": 0.75, "rollout/log_prob_mismatch_max": 2.0})


def test_sums_equal_those_of_python_numbers_to_the_bit():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert add_up([LossShare(value, {}) for value in values])[0] == sum(value.item() for value in values)
    assert add_up([]) == (0.0, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_numbers_of_every_dtype_are_read_unchanged(dtype):
    tensor = torch.tensor(3, dtype=dtype) / 2 if dtype.is_floating_point else torch.tensor(3, dtype=dtype)
    assert read_numbers([0.1, tensor, tensor[None], 7]) == [0.1, tensor.item(), tensor.item(), 7]
