"""Fingerprints computed on a CUDA device equal those of the CPU."""

import pytest
import torch

from hybridflow.rollout.weight_sync.fingerprint import BLOCK, PART, Fingerprints, fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

SIZES = (0, 1, 7, 1000, 8 * BLOCK - 1, 20 * BLOCK + 5, 4 * PART + 3)
"""The last is mixed in several parts in all dtypes."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_fingerprints_of_a_device_equal_those_of_the_cpu(gpu, dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = {str(size): (50 * torch.randn(size, generator=generator)).to(dtype) for size in SIZES}
    tensors["transposed"] = tensors["1000"].view(25, 40).T
    found = Fingerprints({name: tensor.to(gpu) for name, tensor in tensors.items()}).read()
    assert found == {name: fingerprint(tensor) for name, tensor in tensors.items()}


def test_a_tensor_may_be_freed_before_its_fingerprint_is_read(gpu):
    started = Fingerprints()
    for value in range(20):
        started.add(str(value), torch.full((PART,), float(value), device=gpu))  # in memory that the next one may reuse
    assert started.read() == {str(value): fingerprint(torch.full((PART,), float(value))) for value in range(20)}
