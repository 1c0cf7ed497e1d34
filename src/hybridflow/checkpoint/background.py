"""A background save: the state is copied at once, and a thread writes the copy while training continues."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hybridflow.checkpoint.state import map_tensors
from hybridflow.runtime.boxes import local, with_local
from hybridflow.runtime.host_memory import HostMemory
from hybridflow.runtime.side_stream import SideStream

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class BackgroundSave(Generic[Result]):
    """A thread that runs `write`, started at construction; `finish` waits for it and raises its error.

    Where no thread can be started, as without memory for its stack, `write` has run after construction.
    """

    def __init__(self, write: Callable[[], Result]) -> None:
        self._write, self._written = write, Future[Result]()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        try:
            threading.Thread(None, copy_context().run, "checkpoint", (self._run,), daemon=True).start()
        except RuntimeError as error:
            logger.warning("the checkpoint is written before the run goes on: %s", error)
            self._run()

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # a new thread has the first device, whose memory CUDA would use
            self._written.set_result(self._write())
        except BaseException as error:  # raised by `finish`
            self._written.set_exception(error)

    def finish(self) -> Result:
        """Wait until the state is written and return the result. Raise the error of the write, if it failed."""
        return self._written.result()


class StateCopy:
    """A copier of states to host memory, which is pinned for tensors on a GPU, and reused by the next copy.

    So a copy takes no memory of the device, and lasts until the next one is made.
    """

    def __init__(self) -> None:
        self._memory: HostMemory | None = None

    def __call__(self, state: Any) -> Any:
        """Return a copy of a state that later updates do not change. Shards of DTensors are copied, not gathered.

        Raises ModelError if the host has too little memory.
        """
        tensors: list[Tensor] = []
        without_tensors = map_tensors(state, tensors.append)
        if not tensors:
            return without_tensors
        shards = [local(tensor).detach() for tensor in tensors]
        sizes = [shard.nbytes for shard in shards]
        device = next((shard.device for shard in shards if shard.device.type != "cpu"), shards[0].device)
        if self._memory is None or self._memory.sizes != sizes:
            self._memory = None  # before the next one is allocated
            self._memory = HostMemory(sizes, device)
        copies, stream = {}, SideStream(device)
        with stream():
            for tensor, shard, part in zip(tensors, shards, self._memory.parts, strict=True):
                copy = part.view(shard.dtype).view(shard.shape)
                copies[id(tensor)] = with_local(tensor, copy.copy_(shard, non_blocking=True))
        stream.synchronize()
        return map_tensors(state, lambda tensor: copies[id(tensor)])


def copy_state(state: Any) -> Any:
    """Copy a state to the host, so that later updates do not change it; see `StateCopy`."""
    return StateCopy()(state)
