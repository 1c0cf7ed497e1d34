"""Host memory in parts; pinning is recorded without a GPU, and `tests/engines/test_offload_gpu.py` pins for real."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybridflow.errors import ModelError
from hybridflow.runtime.host_memory import PAGE, HostMemory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def pinned(monkeypatch):
    """Return the pinned ranges, address -> bytes, and a list of codes that CUDA returns before 0."""
    ranges, codes = {}, []

    def register(address, num_bytes, flags):
        if codes:
            return codes.pop()
        ranges[address] = num_bytes
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=ranges.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return ranges, codes


def test_parts_have_their_sizes_and_share_no_storage():
    sizes = [3, 0, 513, 8]
    parts = HostMemory(sizes, CPU).parts
    assert [part.nbytes for part in parts] == [part.untyped_storage().nbytes() for part in parts] == sizes
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [part.unique().tolist() for part in parts] == [[0], [], [2], [3]]
    assert all(part.data_ptr() % 512 == 0 for part in parts if part.nbytes)
    assert parts[3].view(torch.float32).shape == (2,)


def test_memory_is_pinned_in_whole_pages_until_it_is_dropped(pinned):
    ranges, _ = pinned
    for sizes, device in (([100], CPU), ([], GPU), ([0], GPU)):
        assert (HostMemory(sizes, device) is not None, ranges) == (True, {})
    memory = HostMemory([5000, 4], GPU)
    ((address, num_bytes),) = ranges.items()
    assert (address % PAGE, num_bytes) == (0, 2 * PAGE)
    first, last = memory.parts
    assert (first.data_ptr(), last.data_ptr() + 4 <= address + num_bytes) == (address, True)
    del memory
    gc.collect()
    assert ranges == {}
    assert first.fill_(1).sum() == 5000  # parts are valid as memory that is not pinned


def test_memory_that_cannot_be_pinned_or_allocated_is_an_error(pinned, monkeypatch):
    pinned[1].append(2)
    with pytest.raises(ModelError, match=r"^2\.0 GiB of host memory .* cannot be pinned \(CUDA error 2\); offload"):
        HostMemory([2**31], GPU)

    def empty(count, dtype):
        raise MemoryError("Unable to allocate 2.00 GiB")

    monkeypatch.setattr(np, "empty", empty)
    with pytest.raises(ModelError, match=r"2\.0 GiB of host memory .* cannot be allocated \(Unable to allocate"):
        HostMemory([2**31], GPU)
