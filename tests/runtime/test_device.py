"""The device of a process, with PyTorch's answers for a machine with GPUs."""

import importlib.util
import shutil

import pytest
import torch

from hybridflow.errors import ConfigError, ModelConfigError
from hybridflow.runtime.device import (
    can_compile_for_gpu,
    gpu_has_bfloat16,
    own_device,
    preferred_dtype,
    require_dtype,
    use_own_device,
)


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


@pytest.mark.parametrize(("count", "rank", "device"), [(1, 0, "cuda:0"), (1, 3, "cuda:0"), (4, 3, "cuda:3")])
def test_a_rank_uses_a_device_that_it_sees(gpus, monkeypatch, count, rank, device):
    chosen = gpus(count)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    use_own_device()
    assert chosen == [torch.device(device)] == [own_device()]


def test_without_a_gpu_no_device_is_made_current(gpus):
    chosen = gpus(0)
    use_own_device()
    assert (chosen, own_device(), gpu_has_bfloat16(), preferred_dtype()) == ([], torch.device("cpu"), None, "float32")


@pytest.mark.parametrize(
    ("value", "count", "expected"),
    [
        *((hidden, 0, "cpu") for hidden in ("", " ", "-1", "-1,0", "NoDevFiles")),
        *(("0,1", 2, "cuda"), ("1,-1,0", 1, "cuda"), ("GPU-8a1f", 1, "cuda"), ("MIG-1a,MIG-2b", 1, "cuda")),
        ("7", 0, "1 GPUs, but CUDA finds 0"),
        ("abc", 0, "1 GPUs, but CUDA finds 0"),
        ("0,7", 1, "2 GPUs, but CUDA finds 1"),
        ("GPU-8a1f,GPU-9999", 1, "2 GPUs, but CUDA finds 1"),
    ],
)
def test_visible_devices_are_used_hidden_or_an_error(gpus, monkeypatch, value, count, expected):
    gpus(count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    if expected in ("cpu", "cuda"):
        assert own_device().type == expected
        return
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES='{value}' is invalid: it names {expected} of them"):
        own_device()


def test_a_gpu_named_for_a_build_without_cuda_is_an_error(monkeypatch):
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"CUDA finds 0 of them \(torch .* is built for CPUs only\).* set it to ''"):
        own_device()


def test_bfloat16_on_a_gpu_without_it_is_an_error(gpu_without_bfloat16):
    message = r"model.dtype='bfloat16' is not supported by cuda:0 \(V100, compute capability 7\.0; .* 'float32'"
    with pytest.raises(ModelConfigError, match=message):
        require_dtype(torch.bfloat16, gpu_without_bfloat16)
    require_dtype(torch.float32, gpu_without_bfloat16)
    require_dtype(torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_the_preferred_dtype_is_bfloat16_where_the_gpu_has_it(gpus, monkeypatch, capability, dtype):
    gpus(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (gpu_has_bfloat16(), preferred_dtype()) == (dtype == "bfloat16", dtype)


@pytest.mark.parametrize(
    ("triton", "compilers", "answer"), [(True, {"gcc"}, True), (True, set(), False), (False, {"gcc"}, False)]
)
def test_a_gpu_needs_triton_and_a_c_compiler(monkeypatch, triton, compilers, answer):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    assert can_compile_for_gpu() is answer
