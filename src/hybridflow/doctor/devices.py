"""The devices that compute."""

import os
from pathlib import Path

import torch

from hybridflow.doctor.finding import Finding
from hybridflow.errors import ConfigError
from hybridflow.runtime import require_visible_devices
from hybridflow.runtime.disk_space import describe_bytes

NVIDIA = Path("/dev/nvidiactl")
"""There is such a file if the driver of NVIDIA's GPUs is loaded."""

NAME = "devices"


def check_devices(driver: Path = NVIDIA) -> Finding:
    """Report the GPUs with their memory, or that the CPU computes."""
    try:
        require_visible_devices()
    except ConfigError as error:
        return Finding(NAME, "error", str(error), "correct or unset CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        text = f"no GPU: the CPU computes, with {cores} cores"
        if driver.exists():
            fix = f"torch {torch.__version__} does not find the GPUs of this machine; install a CUDA build of torch"
            return Finding(NAME, "warning", text, fix)
        return Finding(NAME, "ok", text)
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    free = [torch.cuda.mem_get_info(index)[0] for index in range(len(gpus))]
    text = ", ".join(
        f"{gpu.name} ({describe_bytes(left)} of {describe_bytes(gpu.total_memory)} free)"
        for gpu, left in zip(gpus, free, strict=True)
    )
    if old := [gpu.name for gpu in gpus if gpu.major < 8]:
        fix = f"{old[0]} does not compute in bfloat16; set model.dtype = 'float32'"
        return Finding(NAME, "warning", text, fix)
    return Finding(NAME, "ok", text)
