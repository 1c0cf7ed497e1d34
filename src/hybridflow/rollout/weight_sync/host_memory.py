"""Memory of this process that other processes of the node can map.

It is an anonymous file (`memfd_create`), opened by others through /proc. It has no name that could outlive its
processes: the kernel frees it when no process has it open or mapped, also after SIGKILL.
"""

import os
import weakref
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


class SharedHostMemory:
    """Shared memory, `tensor` (num_bytes,) uint8; others can map it by `handle` until `close` or until it is freed."""

    def __init__(self, num_bytes: int) -> None:
        descriptor = os.memfd_create("hybridflow-weights")
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            os.ftruncate(descriptor, max(1, num_bytes))
            self.handle = HostHandle(os.getpid(), descriptor, os.fstat(descriptor).st_ino, num_bytes)
            self.tensor = _mapped(self.handle, shared=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let no further process map the memory; those that did keep it."""
        self._close()


def map_host_memory(handle: HostHandle) -> Tensor:
    """Return another process's memory as a tensor (num_bytes,) uint8; writing to it changes a private copy.

    Raises WeightSyncError if the memory is not on this node, or closed.
    """
    try:
        return _mapped(handle, shared=False)
    except (OSError, RuntimeError) as error:
        raise WeightSyncError(f"shared memory of process {handle.pid} cannot be mapped: {error}") from error


def _mapped(handle: HostHandle, *, shared: bool) -> Tensor:
    """Return the file as a tensor, which unmaps it when it is freed; only a shared one writes to the file."""
    path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
    if os.stat(path).st_ino != handle.inode:
        raise FileNotFoundError(f"'{path}' is another file")
    return torch.from_file(path, shared=shared, size=max(1, handle.num_bytes), dtype=torch.uint8)[: handle.num_bytes]
