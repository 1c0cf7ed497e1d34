"""The memory limit of a process, and the peak memory of a call."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.errors import ModelConfigError

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
