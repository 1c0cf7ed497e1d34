import pytest
import torch

from hybridflow.runtime import measure_peak_flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_peak_is_a_rate_of_this_machine(dtype):
    assert 1e6 < measure_peak_flops(dtype, size=64) < 1e17
