"""GPU memory that other processes on the same GPU can map, by PyTorch's CUDA IPC handles.

PyTorch counts the uses of a handle: each handle must be mapped once. An event orders the mapping process's reads after
the writes that precede the handle. The counts are in a file in /dev/shm, which the reaper removes after SIGKILL.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from hybridflow.errors import WeightSyncError

_DEVICE = 6
"""Position of the device among the arguments of `rebuild_cuda_tensor`: an index that is valid in one process only."""


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
