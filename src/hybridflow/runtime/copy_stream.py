"""A CUDA stream for copies between host and device, which run beside the kernels of the current stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class CopyStream:
    """A side stream of a device; on a device without streams every copy is complete when it returns."""

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

    def wait(self) -> None:
        """Let the current stream wait for the side stream; the host does not wait."""
        import torch

        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Let the host wait for the side stream."""
        if self._stream is not None:
            self._stream.synchronize()
