"""The memory limit of a process, and errors of too little memory that say who holds it, and the fix."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.errors import HybridFlowError, ModelConfigError, ModelError

if TYPE_CHECKING:
    import torch

HOST_SHARE, DEVICE_SHARE = 0.5, 0.9
"""Shares of the free memory to use. The host also holds batches, the object store and the page cache."""

_KEY = 'memory.max_tokens_per_micro_batch = "auto"'
_STATUS, _CLEAR_REFS, _MEMINFO = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")


def memory_limit(device: "torch.device", processes_on_node: int = 1) -> int:
    """Return the bytes this process may use in total: of its device, or of its share of the host on a CPU."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(DEVICE_SHARE * (free + torch.cuda.memory_reserved(device)))
    return _kilobytes(_STATUS, "VmRSS") * 1024 + int(HOST_SHARE * available_memory() / processes_on_node)


def available_memory() -> int:
    """Return the bytes of host memory that new allocations can use."""
    return _kilobytes(_MEMINFO, "MemAvailable") * 1024


def peak_memory_of(call: Callable[[], object], device: "torch.device") -> int:
    """Return the peak memory of the whole process in bytes while `call` runs."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device)
    try:
        _CLEAR_REFS.write_text("5")  # resets the peak
    except OSError as error:
        raise ModelConfigError(
            f"{_KEY} needs write access to {_CLEAR_REFS} to measure memory ({error}); set a number of tokens."
        ) from error
    call()
    return _kilobytes(_STATUS, "VmHWM") * 1024


def _kilobytes(path: Path, name: str) -> int:
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    except (OSError, StopIteration) as error:
        raise ModelConfigError(
            f"{_KEY} needs {name} in {path}, which this system lacks; set a number of tokens."
        ) from error


LESS_MEMORY = (
    "set a smaller memory.max_tokens_per_micro_batch, model.gradient_checkpointing = true, or memory.offload for roles "
    "that can wait"
)
"""Advice if training runs out of memory."""

NOTABLE_BYTES = 2**30
"""Memory of other processes that an error mentions; the CUDA context of one process takes about half of it."""


UNTYPED = ("DefaultCPUAllocator", "std::bad_alloc", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts in PyTorch's errors of too little memory that have no type of their own: of the host, and of libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether PyTorch, NumPy or Python reports too little memory, of a device or of the host."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in UNTYPED)


def out_of_memory(
    error: BaseException,
    doing: str,
    device: "torch.device",
    fix: str = LESS_MEMORY,
    kind: type[HybridFlowError] = ModelError,
) -> HybridFlowError:
    """Return an error of class `kind` for one that `is_out_of_memory`; `doing`: what needed the memory."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    return kind(f"out of memory in {doing}: {text}; {describe_memory(device)}; {fix}.")


@contextmanager
def naming_out_of_memory(
    doing: str, device: "torch.device", fix: str = LESS_MEMORY, kind: type[HybridFlowError] = ModelError
) -> Iterator[None]:
    """Raise `out_of_memory` instead of an error of PyTorch that means too little memory."""
    try:
        yield
    except HybridFlowError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(error, doing, device, fix, kind) from error
        raise


def describe_memory(device: "torch.device") -> str:
    """Return free and total memory of a GPU, and who holds the rest; for other devices the host's free memory."""
    import torch

    if device.type != "cuda":
        return f"the host has {_gib(available_memory())} GiB available"
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    text = (
        f"{device} has {_gib(free)} of {_gib(total)} GiB free, this process holds {_gib(held)} GiB "
        f"({_gib(used)} GiB in tensors)"
    )
    if (others := total - free - held) < NOTABLE_BYTES:
        return text
    return f"{text}, other processes and libraries {_gib(others)} GiB (stop other runs on this GPU; see nvidia-smi)"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
