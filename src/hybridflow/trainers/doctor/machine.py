"""Devices, shared memory and open files of this machine."""

import os
import resource
import shutil
from pathlib import Path

from hybridflow.checkpoint.disk_space import describe_bytes
from hybridflow.trainers.doctor.finding import Finding

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 2**30
"""Bytes that Ray's object store and the collectives of two processes need for small models."""

LEAST_OPEN_FILES = 4096
"""Ray opens some hundred files and sockets for each worker and node."""


def check_devices() -> Finding:
    """Report the GPUs, or that the CPU computes."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not torch.cuda.is_available():
        return Finding("devices", "ok", f"no GPU: the CPU computes, with {cores} cores")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    old = [gpu.name for gpu in gpus if gpu.major < 8]
    text = ", ".join(f"{gpu.name} ({describe_bytes(gpu.total_memory)})" for gpu in gpus)
    if old:
        return Finding(
            "devices", "warning", text, f"{old[0]} does not compute in bfloat16; set model.dtype = 'float32'"
        )
    return Finding("devices", "ok", text)


def check_shared_memory(directory: Path = SHARED_MEMORY, least: int = LEAST_SHARED_MEMORY) -> Finding:
    """Report the free shared memory."""
    if not directory.is_dir():
        return Finding("shared memory", "warning", f"there is no {directory}", "mount a tmpfs there; Ray uses it")
    free = shutil.disk_usage(directory).free
    text = f"{describe_bytes(free)} free in {directory}"
    if free < least:
        fix = f"give it {describe_bytes(least)} or more, in Docker by --shm-size; or use controller.backend = 'local'"
        return Finding("shared memory", "warning", text, fix)
    return Finding("shared memory", "ok", text)


def check_open_files(least: int = LEAST_OPEN_FILES) -> Finding:
    """Report how many files a process may open."""
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= least:
        return Finding("open files", "ok", f"{limit if limit >= 0 else 'any number of'} files for each process")
    can = f"`ulimit -n {least}` before the run" if highest < 0 or highest >= least else "raise its limit as root"
    return Finding("open files", "warning", f"a process may open {limit} files", f"{can}; many workers need more")
