"""Checksums and slices of tensors on a GPU equal those of the CPU."""

import pytest
import torch

from hybridflow.engines.resharding import checksum_of_box
from hybridflow.runtime.partial_tensor import PartialTensor

pytestmark = pytest.mark.gpu

BOX = ((40, 700), (256, 512))


def parts(gpu):
    """Return the box of a bfloat16 tensor on the CPU and on the GPU."""
    whole = torch.randn(1000, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    part = whole[40:700, 256:512].contiguous()
    return part, part.to(gpu)


def test_sum_of_a_box_on_a_gpu_equals_that_of_the_cpu(gpu, monkeypatch):
    on_cpu, on_gpu = parts(gpu)
    for size in (2**22, 1000):
        monkeypatch.setattr("hybridflow.engines.resharding.PART", size)
        assert int(checksum_of_box(on_gpu, BOX, 8)) == int(checksum_of_box(on_cpu, BOX, 8))


def test_copy_of_a_slice_on_a_gpu_stays_there(gpu):
    on_cpu, on_gpu = parts(gpu)
    weight = PartialTensor((1000, 1024), torch.bfloat16, "weight", BOX, on_gpu)
    target = torch.empty(100, 256, dtype=torch.bfloat16, device=gpu)
    target.copy_(weight.narrow(0, 40, 100)[:, 256:512])
    assert weight.device == target.device
    assert torch.equal(target.cpu(), on_cpu[:100])
