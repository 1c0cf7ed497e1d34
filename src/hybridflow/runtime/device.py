"""The device that a process computes on, and the compilation of its graphs by torch.compile."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hybridflow.errors import ConfigError, ModelConfigError

if TYPE_CHECKING:
    import torch


def free_cached_memory() -> None:
    """Release the GPU memory that PyTorch caches; does nothing on a CPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_device_memory(device: "torch.device") -> int:
    """Return the memory of a CUDA device that is free, in bytes, after releasing what PyTorch caches."""
    import torch

    free_cached_memory()
    return torch.cuda.mem_get_info(device)[0]


def use_own_device() -> None:
    """Make `own_device` the current CUDA device; without it, PyTorch takes the device with the index LOCAL_RANK.

    Call it before a device mesh or a process group is made. Does nothing without a CUDA device.
    """
    import torch

    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)


def own_device() -> "torch.device":
    """Return the CUDA device of this local rank, or the CPU if there is no CUDA device.

    A process that sees fewer devices than its node has ranks, as a Ray worker sees only its own, takes one of those.
    Raises ConfigError as `require_visible_devices` does.
    """
    import torch

    require_visible_devices()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def require_visible_devices() -> None:
    """Raise ConfigError if CUDA_VISIBLE_DEVICES names devices that CUDA does not find: a run would use other ones.

    An empty value, or one that begins with -1, hides all devices on purpose.
    """
    import torch

    value = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not entry or entry.startswith("-") or entry == "NoDevFiles":
            break  # CUDA reads no further
        named.append(entry)
    if not named or (count := torch.cuda.device_count()) >= len(named):
        return
    if count and all(entry.startswith("MIG") for entry in named):
        return  # of several parts of divided GPUs, CUDA uses the first
    build = f"torch {torch.__version__} is built for CPUs only" if torch.version.cuda is None else "see nvidia-smi -L"
    raise ConfigError(
        f"CUDA_VISIBLE_DEVICES={value!r} is invalid: it names {len(named)} GPUs, but CUDA finds {count} of them "
        f"({build}); list indices or UUIDs of GPUs of this machine, unset it to use all of them, or set it to '' to "
        "compute on CPUs."
    )


def require_dtype(dtype: "torch.dtype", device: "torch.device") -> None:
    """Raise ModelConfigError for bfloat16 on a GPU that cannot multiply such matrices."""
    import torch

    if dtype != torch.bfloat16 or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    raise ModelConfigError(
        f"model.dtype='bfloat16' is not supported by {device} ({torch.cuda.get_device_name(device)}, compute "
        f"capability {capability}; it needs 8.0 or more); use model.dtype = 'float32'."
    )


def gpu_has_bfloat16() -> bool | None:
    """Return whether the CUDA device of this process computes in bfloat16; None without a device."""
    import torch

    device = own_device()
    if device.type != "cuda":
        return None
    # It reads properties only: making the device current would take memory of it in a driver that does not compute.
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies matrices in bfloat16, as Linux says."""
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def preferred_dtype() -> Literal["bfloat16", "float32"]:
    """Return the fastest compute dtype of this process's device: bfloat16 on a GPU that has it, otherwise float32."""
    return "bfloat16" if gpu_has_bfloat16() else "float32"


_counted = 0


def can_compile_for_gpu() -> bool:
    """Return whether torch.compile works for a GPU here: it needs Triton, and a C compiler for its launchers."""
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    has_compiler = any(shutil.which(compiler) for compiler in compilers if compiler)
    return has_compiler and importlib.util.find_spec("triton") is not None


def take_compilations() -> int:
    """Return the number of graphs that torch.compile has compiled in this process since the last call."""
    global _counted
    tracer = sys.modules.get("torch._dynamo.utils")  # importing it takes longer than torch itself
    total = tracer.counters["stats"]["unique_graphs"] if tracer else 0
    taken, _counted = total - min(_counted, total), total  # a reset of the counters starts again from 0
    return taken
