"""A CUDA stream for work beside the kernels of the current stream, such as copies between host and device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SideStream:
    """A side stream of a device; on a device without streams, work is done when its call returns."""

    def __init__(self, device: "torch.device") -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run operations on the side stream, after everything that the current stream was given so far."""
        import torch

        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def keep(self, tensor: "Tensor") -> None:
        """Do not reuse the memory of a tensor before the work that the side stream has now is done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def wait(self) -> None:
        """Let the current stream wait for the side stream; the host does not wait."""
        import torch

        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Let the host wait for the side stream."""
        if self._stream is not None:
            self._stream.synchronize()
