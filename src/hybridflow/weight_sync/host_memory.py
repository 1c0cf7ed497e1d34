"""Memory of this process that other processes of the node can map.

It is an anonymous file (`memfd_create`), opened by others through /proc. It has no name that could outlive its
processes: the kernel frees it when no process has it open or mapped, also after SIGKILL.
"""

import mmap
import os
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.errors import WeightSyncError


class HostHandle(NamedTuple):
    """The place of shared memory: the process, its descriptor, the file's inode, and the size in bytes."""

    pid: int
    descriptor: int
    inode: int
    num_bytes: int


class HostMemory:
    """Shared memory, `tensor` (num_bytes,) uint8; others can map it by `handle` until `close`."""

    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create("hybridflow-weights")
        try:
            os.ftruncate(self._descriptor, max(1, num_bytes))
            self.tensor = _tensor(self._descriptor, num_bytes, mmap.MAP_SHARED)
            self.handle = HostHandle(os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino, num_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let no further process map the memory; those that did keep it."""
        os.close(self._descriptor)


def map_host_memory(handle: HostHandle) -> Tensor:
    """Return another process's memory as a tensor (num_bytes,) uint8; writing to it changes a private copy.

    Raises WeightSyncError if the memory is not on this node, or closed.
    """
    try:
        descriptor = os.open(f"/proc/{handle.pid}/fd/{handle.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != handle.inode:
                raise FileNotFoundError("it is another process's file")
            return _tensor(descriptor, handle.num_bytes, mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"shared memory of process {handle.pid} cannot be mapped: {error}") from error


def _tensor(descriptor: int, num_bytes: int, flags: int) -> Tensor:
    """Return the mapped file as a tensor, which unmaps it when it is freed."""
    memory = mmap.mmap(descriptor, max(1, num_bytes), flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
