from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridflow.engines import gradient_reduction
from hybridflow.engines.gradient_reduction import fits_unsharded

GPU = torch.device("cuda", 0)


class TwoRanks:
    """Two ranks whose other one has the answer `other_fits`."""

    def __init__(self, other_fits=True, tensor=1):
        self.other_fits, self.tensor = other_fits, tensor

    def count_all(self, flag):
        return int(flag) + int(not self.other_fits)


def parameters(num_bytes):
    """Return parameters whose float32 gradients take this many bytes, and one that is not trained."""
    return [nn.Parameter(torch.empty(num_bytes // 4, device="meta")), torch.empty(10**9, device="meta")]


@pytest.fixture(autouse=True)
def a_gpu_of_80_gib(monkeypatch):
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(gradient_reduction.torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize(
    ("num_bytes", "ranks", "device", "fits"),
    [
        (2**30, TwoRanks(), GPU, True),
        (10 * 2**30, TwoRanks(), GPU, True),  # an eighth of the memory
        (10 * 2**30 + 4, TwoRanks(), GPU, False),
        (4, TwoRanks(other_fits=False), GPU, False),  # all ranks decide alike
        (20 * 2**30, TwoRanks(tensor=2), GPU, True),  # a rank has a part of the gradients
        (4, TwoRanks(), torch.device("cpu"), False),
    ],
)
def test_unsharded_gradients_fit_if_they_take_an_eighth_of_the_memory(num_bytes, ranks, device, fits):
    assert fits_unsharded(parameters(num_bytes), ranks, device) is fits
