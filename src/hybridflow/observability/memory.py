"""How much memory this process holds, on the host and, where CUDA is in use, on its device."""

import logging
import os
import resource
import sys
from pathlib import Path

GIB = 1024**3


def log_memory(message: str, logger: logging.Logger) -> None:
    """Log `message` with the memory in use now; nothing is measured unless the logger is at debug level."""
    if logger.isEnabledFor(logging.DEBUG):
        listed = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in memory_bytes().items())
        logger.debug("%s: %s", message, listed)


def memory_bytes() -> dict[str, int]:
    """Bytes of the process: resident now (where /proc tells) and at its peak; of the CUDA device: allocated, reserved.

    torch is not imported for this, nor CUDA started: without them the device has no entry.
    """
    sizes = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        sizes["resident"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit  # of less often updated counters
    sizes["peak_resident"] = max(peak, sizes.get("resident", 0))
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        sizes["cuda_allocated"] = torch.cuda.memory_allocated()
        sizes["cuda_peak_allocated"] = torch.cuda.max_memory_allocated()
        sizes["cuda_reserved"] = torch.cuda.memory_reserved()
    return sizes
