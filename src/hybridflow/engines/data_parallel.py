"""Sums over the data-parallel ranks of a worker group: gradients, losses, counts. With one rank, nothing happens.

A loss is divided by global counts before the first backward pass, so that ranks, like micro-batches, only add up.
"""

import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from hybridflow.errors import WorkerError


def join_process_group(rank: int, world_size: int, address: str, port: int, timeout_s: float | None = None) -> None:
    """Meet the other ranks, once for each process; a rank that is alone meets nobody.

    The store of rank 0 listens at the address that the others are told, not on every interface. Raises WorkerError if
    the others do not come in time.
    """
    if world_size == 1 or dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s or 10**8)
    try:
        listening = _listen(address, port) if rank == 0 else None
        store = TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listening)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise WorkerError(
            f"rank {rank} of {world_size} could not meet the others at {address}:{port}: {error}", rank=rank
        ) from error


def _listen(address: str, port: int) -> int:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    sock.listen()
    return sock.detach()


def num_ranks() -> int:
    """How many ranks there are to sum over."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(value: int) -> int:
    """The sum of every rank's number."""
    if num_ranks() == 1:
        return value
    total = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total)


def gather_lists(values: list[Any]) -> list[Any]:
    """The lists of all ranks, one after another, on every rank."""
    if num_ranks() == 1:
        return values
    gathered: list[Any] = [None] * num_ranks()
    dist.all_gather_object(gathered, values)
    return [value for part in gathered for value in part]


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor], loss: float) -> float:
    """Add up the gradients of all ranks in place; returns the summed loss.

    One collective carries everything. A parameter that no rank has a gradient of keeps none; every rank ends up with
    the same bits.
    """
    if num_ranks() == 1:
        return loss
    parameters = list(parameters)
    dtype = parameters[0].dtype
    has_gradient = torch.tensor([float(p.grad is not None) for p in parameters], dtype=dtype)
    pieces = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    whole = torch.cat([*pieces, has_gradient, torch.tensor([loss], dtype=dtype)])
    dist.all_reduce(whole)
    *sums, counts, total = whole.split([*(p.numel() for p in parameters), len(parameters), 1])
    for parameter, gradient, count in zip(parameters, sums, counts.tolist(), strict=True):
        parameter.grad = gradient.view_as(parameter).clone() if count else None
    return float(total)
