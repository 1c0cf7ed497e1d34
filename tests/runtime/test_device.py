"""The device of a process, with PyTorch's answers for a machine with GPUs."""

import pytest
import torch

from hybridflow.runtime import gpu_has_bfloat16, own_device, preferred_dtype, use_own_device


@pytest.fixture
def gpus(monkeypatch):
    """Return `gpus(count)`, which makes PyTorch report that many; the devices that are made current are recorded."""
    chosen = []

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return pretend


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(1, 0, 0), (1, 3, 0), (4, 3, 3)])
def test_a_rank_uses_a_device_that_it_sees(gpus, monkeypatch, visible, local_rank, index):
    chosen = gpus(visible)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    use_own_device()
    assert chosen == [torch.device("cuda", index)] == [own_device()]


def test_without_a_gpu_no_device_is_made_current(gpus):
    chosen = gpus(0)
    use_own_device()
    assert (chosen, own_device()) == ([], torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 0), "float32"), ((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_the_preferred_dtype_is_bfloat16_where_the_gpu_has_it(gpus, monkeypatch, capability, dtype):
    gpus(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert gpu_has_bfloat16() is (dtype == "bfloat16")
    assert preferred_dtype() == dtype


def test_the_preferred_dtype_of_a_cpu_is_float32(gpus):
    gpus(0)
    assert (gpu_has_bfloat16(), preferred_dtype()) == (None, "float32")
