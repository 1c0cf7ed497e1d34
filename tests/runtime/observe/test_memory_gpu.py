"""The memory of a CUDA device, as the log reports it."""

import pytest
import torch

from hybridflow.runtime.observe import memory_bytes


@pytest.mark.gpu
def test_cuda_memory_is_reported_on_a_gpu(gpu):
    tensor = torch.zeros(2**20, dtype=torch.float32, device=gpu)
    sizes = memory_bytes()
    if gpu.type == "cpu":
        return
    assert sizes["cuda_allocated"] >= tensor.nbytes
    assert sizes["cuda_peak_allocated"] >= sizes["cuda_allocated"]
    assert sizes["cuda_reserved"] >= sizes["cuda_allocated"]
