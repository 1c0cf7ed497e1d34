"""Errors of too little memory: what was done, who holds the memory, and what to change."""

import pytest
import torch

from hybridflow.errors import ModelError, RolloutError
from hybridflow.runtime.memory import describe_memory, naming_out_of_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 2**30


@pytest.fixture
def gpu_memory(monkeypatch):
    """Return `gpu_memory(free, held, used)`, which makes CUDA report these GiB of 80."""

    def report(free, held, used):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held * GIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used * GIB)

    return report


def test_memory_of_another_run_on_the_gpu_is_named(gpu_memory):
    gpu_memory(free=3, held=7, used=6)
    assert describe_memory(GPU) == (
        "cuda:0 has 3.0 of 80.0 GiB free, this process holds 7.0 GiB (6.0 GiB in tensors), other processes and "
        "libraries 70.0 GiB (stop other runs on this GPU; see nvidia-smi)"
    )
    gpu_memory(free=3, held=76.5, used=70)  # the rest is of the driver
    assert describe_memory(GPU).endswith("this process holds 76.5 GiB (70.0 GiB in tensors)")


def test_an_error_names_the_work_the_memory_and_the_fix(gpu_memory):
    gpu_memory(free=1, held=79, used=70)
    with pytest.raises(RolloutError) as raised, naming_out_of_memory("generation", GPU, "use less", RolloutError):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert str(raised.value) == (
        "out of memory in generation: CUDA out of memory. Tried to allocate 2.00 GiB; cuda:0 has 1.0 of 80.0 GiB free, "
        "this process holds 79.0 GiB (70.0 GiB in tensors); use less."
    )


def test_host_memory_that_runs_out_is_named_too():
    with (
        pytest.raises(ModelError, match=r"out of memory in a test: .*DefaultCPUAllocator.*; the host has .* GiB avail"),
        naming_out_of_memory("a test", CPU),
    ):
        torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("text", ["CUDA error: out of memory\nMore", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"])
def test_memory_that_a_library_of_cuda_lacks_is_named_too(text):
    with pytest.raises(ModelError, match=r"^out of memory in a test: CUDA error"), naming_out_of_memory("a test", CPU):
        raise RuntimeError(text)


@pytest.mark.parametrize("error", [ValueError("a shape"), ModelError("DefaultCPUAllocator, named already")])
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as raised, naming_out_of_memory("a test", CPU):
        raise error
    assert raised.value is error
