"""Where the ranks of a worker group meet, once for each process."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from hybridflow.errors import LostWorkerError
from hybridflow.runtime import listen

_has_joined = False


def has_joined() -> bool:
    """Whether this process is part of a group of hybridflow's: another library may have made one for itself."""
    return _has_joined


def join_process_group(rank: int, world_size: int, address: str, port: int, timeout_s: float | None = None) -> None:
    """Meet the other ranks, once for each process; no-op where there is one rank.

    The store of rank 0 listens at the address that the others are told, not on every interface. Raises WorkerError if
    the others do not come in time.
    """
    global _has_joined
    if world_size == 1 or _has_joined:
        return
    timeout = timedelta(seconds=timeout_s or 10**8)
    try:
        listening = listen(address, port).detach() if rank == 0 else None
        store = TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listening)
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise LostWorkerError(
            f"rank {rank} of {world_size} could not meet the others at {address}:{port}: {error}", rank=rank
        ) from error
    _has_joined = True


def join_alone() -> None:
    """Be a group of one, for what needs a group though nobody else is there."""
    global _has_joined
    if not dist.is_initialized():
        dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
    _has_joined = True


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
