"""Memory of this process that other processes can map: of the host, or of a GPU that both use.

Host memory is an anonymous file (`memfd_create`), opened by others through /proc. It has no name that could outlive its
processes: the kernel frees it when no process has it open or mapped, also after SIGKILL. GPU memory is mapped by
PyTorch's CUDA IPC handles, whose uses PyTorch counts: each handle must be mapped once.
"""

import os
import re
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from hybridflow.errors import ConfigError, WeightSyncError


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


_DEVICE = 6
"""Position of the device among the arguments of `rebuild_cuda_tensor`: an index that is valid in one process only."""


EXPANDABLE = re.compile(r"expandable_segments\s*:\s*True")


def require_shareable_memory() -> None:
    """Raise ConfigError if PyTorch's allocator makes expandable segments on GPUs.

    A process maps such memory by copying the owner's file descriptors (pidfd_getfd), which most containers forbid.
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if EXPANDABLE.search(value := os.environ.get(name, "")):
            raise ConfigError(
                f"{name}={value!r} is not supported with rollout.weight_sync='ipc' on GPUs: memory of expandable "
                "segments cannot be shared between processes by CUDA IPC handles; remove expandable_segments:True, or "
                "use rollout.weight_sync = 'broadcast' or 'object_store'."
            )


class GpuHandle(NamedTuple):
    """Shared GPU memory: the unique id of the GPU, and PyTorch's arguments to rebuild the tensor."""

    gpu: str
    arguments: tuple[Any, ...]


def share_gpu_memory(tensor: Tensor) -> GpuHandle:
    """Return a handle for one other process; the tensor must live until it is mapped and read.

    Raises WeightSyncError if the memory cannot be shared, as with the allocator `cudaMallocAsync`.
    """
    try:
        _, arguments = reduce_tensor(tensor)
    except RuntimeError as error:
        raise _not_shared(error) from error
    return GpuHandle(gpu_id(tensor.device), arguments)


def copy_gpu_memory(handle: GpuHandle, device: torch.device) -> Tensor:
    """Return a copy of another process's tensor, complete when this returns.

    Raises WeightSyncError if `device` is not the GPU of the tensor, or if its memory cannot be mapped, and PyTorch's
    OutOfMemoryError if there is no memory for the copy.
    """
    require_same_gpu(handle.gpu, gpu_id(device))
    arguments = (*handle.arguments[:_DEVICE], device.index, *handle.arguments[_DEVICE + 1 :])
    try:
        copy = rebuild_cuda_tensor(*arguments).clone()
        torch.cuda.current_stream(device).synchronize()
    except torch.OutOfMemoryError:
        raise  # of the copy
    except RuntimeError as error:
        raise _not_shared(error) from error
    return copy


def gpu_id(device: torch.device) -> str:
    """Return the unique id of a GPU, which is equal in all processes; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def require_same_gpu(sender: str, receiver: str) -> None:
    """Raise WeightSyncError unless both processes compute on the same GPU, given by its unique id."""
    if sender != receiver:
        found = f"GPU {receiver}" if receiver else "a CPU"
        raise WeightSyncError(
            f"rollout.weight_sync='ipc' shares memory of one GPU, but the trainer is on GPU {sender} and this rollout "
            f"engine on {found}; place both on one GPU, or use rollout.weight_sync = 'broadcast'."
        )


def _not_shared(error: RuntimeError) -> WeightSyncError:
    return WeightSyncError(
        f"GPU memory cannot be shared between processes: {' '.join(str(error).split())}; use rollout.weight_sync = "
        "'broadcast' or 'object_store'."
    )
