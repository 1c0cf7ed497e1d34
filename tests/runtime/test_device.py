"""The device of a process, with PyTorch's answers for a machine with GPUs."""

import pytest
import torch

from hybridflow.errors import ConfigError, ModelConfigError
from hybridflow.runtime import gpu_has_bfloat16, own_device, preferred_dtype, require_dtype, use_own_device


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
    ("value", "count", "found"),
    [
        ("7", 0, "1 GPUs, but CUDA finds 0"),
        ("abc", 0, "1 GPUs, but CUDA finds 0"),
        ("0,7", 1, "2 GPUs, but CUDA finds 1"),
        ("GPU-8a1f,GPU-9999", 1, "2 GPUs, but CUDA finds 1"),
    ],
)
def test_devices_that_cuda_does_not_find_are_an_error(gpus, monkeypatch, value, count, found):
    gpus(count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES='{value}' is invalid: it names {found} of them"):
        own_device()


def test_a_gpu_named_for_a_build_without_cuda_is_an_error(monkeypatch):
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"CUDA finds 0 of them \(torch .* is built for CPUs only\).* set it to ''"):
        own_device()


@pytest.mark.parametrize("value", ["", " ", "-1", "-1,0", "NoDevFiles"])
def test_devices_hidden_on_purpose_mean_the_cpu(gpus, monkeypatch, value):
    gpus(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert own_device() == torch.device("cpu")


@pytest.mark.parametrize(("value", "count"), [("0,1", 2), ("1,-1,0", 1), ("GPU-8a1f", 1), ("MIG-1a,MIG-2b", 1)])
def test_devices_that_cuda_finds_are_used(gpus, monkeypatch, value, count):
    gpus(count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert own_device().type == "cuda"


def test_bfloat16_on_a_gpu_without_it_is_an_error(gpu_without_bfloat16):
    message = r"model.dtype='bfloat16' is not supported by cuda:0 \(V100, compute capability 7\.0; .* 'float32'"
    with pytest.raises(ModelConfigError, match=message):
        require_dtype(torch.bfloat16, gpu_without_bfloat16)
    require_dtype(torch.float32, gpu_without_bfloat16)
    require_dtype(torch.bfloat16, torch.device("cpu"))


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
