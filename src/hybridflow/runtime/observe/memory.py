"""Memory use of this process on the host and, if CUDA is in use, on its device."""

import logging
import resource
import sys

import psutil

GIB = 1024**3


def log_memory(message: str, logger: logging.Logger) -> None:
    """Log `message` with the memory in use, at debug level only."""
    if logger.isEnabledFor(logging.DEBUG):
        listed = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in memory_bytes().items())
        logger.debug("%s: %s", message, listed)


def memory_bytes() -> dict[str, int]:
    """Return bytes of resident memory, now and at its peak, and of allocated and reserved CUDA memory.

    It neither imports torch nor initializes CUDA; CUDA entries are missing until another module did.
    """
    sizes = {"resident": psutil.Process().memory_info().rss}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # its counters are updated less often
    sizes["peak_resident"] = max(peak, sizes["resident"])
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        sizes["cuda_allocated"] = torch.cuda.memory_allocated()
        sizes["cuda_peak_allocated"] = torch.cuda.max_memory_allocated()
        sizes["cuda_reserved"] = torch.cuda.memory_reserved()
    return sizes
