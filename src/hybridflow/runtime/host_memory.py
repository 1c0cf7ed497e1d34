"""Host memory that exchanges data with a device: page-locked (pinned) for a GPU, so that copies run beside kernels."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridflow.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    import torch

PAGE = 4096
ALIGNMENT = 512
"""Alignment in bytes of each part, as on a GPU."""


class HostMemory:
    """One block of host memory, divided into `parts` (num_bytes,) uint8, which share no storage; pinned for a GPU.

    PyTorch's own pinned memory is rounded up to a power of two, which can double it. This block has the size of its
    parts; it stays pinned until the object is dropped. Raises ModelError if the host has too little memory.
    """

    def __init__(self, sizes: Sequence[int], device: "torch.device") -> None:
        import numpy as np
        import torch

        self.sizes, starts, end = list(sizes), [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        try:
            block = np.empty(end + 2 * PAGE, dtype=np.uint8)
        except MemoryError as error:
            raise _too_little(end, "allocated", str(error)) from error
        first = -block.ctypes.data % PAGE
        if device.type == "cuda" and end:
            self._pin(block, first, -(-end // PAGE) * PAGE)
        slices = (block[first + start : first + start + size] for start, size in zip(starts, sizes, strict=True))
        self.parts = [torch.from_numpy(part) for part in slices]

    def _pin(self, block: "np.ndarray", first: int, num_bytes: int) -> None:
        """Pin whole pages, which no other allocation shares."""
        import torch

        runtime: Any = torch.cuda.cudart()
        address, portable = block.ctypes.data + first, 1  # pinned for all devices
        if code := int(runtime.cudaHostRegister(address, num_bytes, portable)):
            raise _too_little(num_bytes, "pinned", f"CUDA error {code}")
        # Holds the block until it is unpinned. At exit, the system unpins it.
        weakref.finalize(self, _unpin, runtime, address, block).atexit = False


def _unpin(runtime: Any, address: int, block: "np.ndarray") -> None:
    runtime.cudaHostUnregister(address)


def _too_little(num_bytes: int, what: str, reason: str) -> ModelError:
    return ModelError(
        f"{num_bytes / 2**30:.1f} GiB of host memory for the copy of a state cannot be {what} ({reason}); "
        "offload fewer roles (memory.offload), set trainer.save_in_background = false, or use more nodes."
    )
