"""The process group of the ranks of a worker group, one for each process."""

from collections.abc import Sequence
from datetime import timedelta
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from hybridflow.errors import LostWorkerError, WorkerError


def num_ranks() -> int:
    """Return the size of this process's default group, whichever program made it; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_process_group(rank: int, world_size: int, store: Store | None = None, timeout_s: float | None = None) -> None:
    """Join the default process group; no-op with one rank, or if the process is already this rank of such a group.

    `store`: the store through which the ranks find each other, e.g. a `torch.distributed.FileStore` in a directory of
    this user; None: the one that the environment variables of torchrun name. Raises LostWorkerError if the other ranks
    do not connect in time, and WorkerError if the process belongs to a different group or nothing names a store.
    """
    if world_size == num_ranks() == 1:
        return
    if dist.is_initialized():
        _require_same_group(rank, world_size)
        return
    timeout = timedelta(seconds=timeout_s or 10**8)
    try:
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)
    except ValueError as error:
        raise WorkerError(
            f"rank {rank} of {world_size} does not know where the others are ({error}); start the processes with "
            "torchrun, build the workers on a backend, or call join_process_group with a store.",
            rank=rank,
        ) from error
    except (OSError, RuntimeError) as error:
        raise LostWorkerError(
            f"rank {rank} of {world_size} could not connect to the others: {error}", rank=rank
        ) from error


def join_alone() -> None:
    """Create a group of one rank for code that requires a process group; no-op if there is a group."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)


def require_backends(device: torch.device) -> None:
    """Raise WorkerError unless the default group can communicate tensors of the CPU and of the device.

    All ranks call it. NCCL does not communicate between two ranks on one GPU.
    """
    backends = str(dist.get_backend_config())
    if missing := [name for name in sorted({"cpu", device.type}) if f"{name}:" not in backends]:
        raise WorkerError(
            f"the process group has no backend for {' and '.join(missing)} tensors (backends: {backends}): an engine "
            f"uses both; call torch.distributed.init_process_group({_backend()!r}, ...).",
            rank=dist.get_rank(),
        )
    if f"{device.type}:nccl" in backends:
        gpus: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gpus, f"{gethostname()} {torch.cuda.get_device_properties(device).uuid}")
        require_one_rank_per_gpu(gpus)


def require_one_rank_per_gpu(gpus: Sequence[str]) -> None:
    """Raise WorkerError if two ranks have the same GPU; `gpus` names the node and the GPU of each rank."""
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) != rank:
            raise WorkerError(
                f"ranks {first} and {rank} have the same GPU ({gpu}), on which NCCL does not connect two ranks; start "
                "one process per GPU (torchrun --nproc-per-node), and show each its own GPU (LOCAL_RANK, or "
                "CUDA_VISIBLE_DEVICES).",
                rank=dist.get_rank(),
            )


def _require_same_group(rank: int, world_size: int) -> None:
    found, count = dist.get_rank(), dist.get_world_size()
    if (found, count) != (rank, world_size):
        raise WorkerError(
            f"this process is rank {found} of {count} in a torch.distributed group, but rank {rank} of {world_size} "
            "in its worker group: engines would mix two groups; use controller.backend='ray', or build the workers "
            "in a process without a group.",
            rank=rank,
        )


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
