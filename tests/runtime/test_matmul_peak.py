from itertools import accumulate

import pytest
import torch

from hybridflow.runtime import matmul_peak
from hybridflow.runtime.matmul_peak import measure_flops_now, measure_peak_flops, peak_flops


def test_peak_is_a_plausible_rate_measured_once():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert 0 < measure_peak_flops(dtype, size=64) < 1e17
    assert 0 < measure_flops_now(torch.float32, 8, period_s=0.001) < 1e17
    assert peak_flops(torch.float32) == peak_flops(torch.float32)


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
    options = {"size": 8, "rounds": 5, "clock": machine.clock, "sleep": machine.sleep}
    assert measure_peak_flops(torch.float32, **options) == 2 * 8**3 / 0.5
    assert machine.pauses == 4  # between rounds


@pytest.mark.parametrize(("device", "threads", "size"), [("cpu", 8, 512), ("cpu", 9, 1024), ("cuda", 1, 8192)])
def test_few_threads_of_a_cpu_multiply_smaller_matrices(device, threads, size):
    assert matmul_peak.enough_for(torch.device(device), threads) == size


def test_a_gpu_multiplies_random_numbers_and_leaves_the_generators_alone(monkeypatch):
    meta, made = torch.device("meta"), []
    monkeypatch.setattr(torch, "Generator", lambda device: made.append(device) or torch._C.Generator())
    before = torch.get_rng_state()
    assert matmul_peak._matrix(8, torch.bfloat16, meta).shape == (8, 8)
    assert made == [meta]
    assert torch.equal(matmul_peak._matrix(8, torch.float32, torch.device("cpu")), torch.ones(8, 8))
    assert torch.equal(torch.get_rng_state(), before)


def clock_of(*durations):
    """Return a clock whose readings are these seconds apart."""
    readings = accumulate(durations, initial=0.0)
    return lambda: next(readings)


def test_the_rate_now_is_that_of_a_period_with_its_pauses():
    rate = measure_flops_now(torch.float32, 8, period_s=20.0, clock=clock_of(1.0, 9.0, 1.0, 9.0))
    assert rate == 2 * 8**3 * 4 / 20
    rates = [measure_flops_now(torch.float32, 8, period_s=2.0, clock=clock_of(s, s)) for s in (1.0, 4.0)]
    assert rates == [2 * 8**3, 2 * 8**3 / 4]
