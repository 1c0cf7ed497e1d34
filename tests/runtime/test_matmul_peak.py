import pytest
import torch

from hybridflow.runtime import measure_peak_flops, peak_flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_peak_is_a_plausible_rate(dtype):
    assert 0 < measure_peak_flops(dtype, size=64) < 1e17


class BusyMachine:
    """A clock on which a product takes 10 s until the third pause, and 0.5 s afterwards."""

    def __init__(self):
        self.now, self.pauses = 0.0, 0

    def clock(self):
        self.now += 10.0 if self.pauses < 3 else 0.5
        return self.now

    def sleep(self, seconds):
        self.pauses += 1


def test_load_that_passes_between_rounds_does_not_lower_the_peak():
    machine = BusyMachine()
    assert measure_peak_flops(torch.float32, size=8, clock=machine.clock, sleep=machine.sleep) == 2 * 8**3 / 0.5


def test_a_process_measures_its_peak_once():
    assert peak_flops(torch.float32) == peak_flops(torch.float32)
