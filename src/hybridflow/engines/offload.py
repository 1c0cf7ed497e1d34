"""Offload of an idle role's weights and optimizer state to pinned host memory, in two levels.

    level        on the device                                     for
    weights      the weights that the model computes with          forward passes, weight sync, generation
    optimizer    and masters and moments of the optimizer          updates, loading a checkpoint

Only the memory of a tensor moves: it stays the same object, on its device, and has no storage while it is offloaded.
So the shards of FSDP2 and views of weights stay valid. Buffers and step counts are small and stay on the device.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from hybridflow.engines.sharding import reshard
from hybridflow.runtime.boxes import local, with_local
from hybridflow.runtime.host_memory import HostMemory
from hybridflow.runtime.memory import out_of_memory
from hybridflow.runtime.side_stream import SideStream


class Offload:
    """A re-entrant context, `with offload():`, that keeps weights, or also optimizer state, on `device`.

    `parameters` are the trained ones, inside or outside the model; `optimizer_state` has tensors by parameter. Host
    copies are allocated once. Tensors that cannot change in a context are not copied back when it ends.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[Tensor],
        optimizer_state: Mapping[Any, dict[str, Any]],
        device: torch.device,
    ) -> None:
        trained, own = list(parameters), list(model.parameters())
        is_own, is_trained = {id(p) for p in own}, {id(p) for p in trained}
        masters = [p for p in trained if id(p) not in is_own]
        changing = [p for p in own if masters or id(p) in is_trained]
        frozen = [p for p in own if not masters and id(p) not in is_trained]
        self._model, self._trained, self._device = model, trained, device
        self._stream = SideStream(device)
        self._frozen = _Group(lambda: enumerate(frozen))
        self._weights = _Group(lambda: enumerate(changing))
        self._optimizer = _Group(lambda: _state_of(masters, optimizer_state))
        self._release([self._frozen, self._weights, self._optimizer])

    @contextmanager
    def __call__(self, *, with_optimizer: bool = True) -> Iterator[None]:
        """Keep the weights on the device inside the context; `with_optimizer`: all state, which may be changed.

        Raises ModelError, with everything on the host, if the device has too little memory.
        """
        groups = [self._frozen, self._weights]
        if with_optimizer:
            groups.append(self._optimizer)
        self._acquire(groups)
        if with_optimizer:
            self._weights.is_changed = self._optimizer.is_changed = True
        try:
            yield
        finally:
            for group in groups:
                group.users -= 1
            self._release(groups)

    @property
    def is_in_use(self) -> bool:
        """Whether a context keeps the weights on the device."""
        return self._weights.users > 0

    def wait(self) -> None:
        """Let the current stream wait for the optimizer state, which is copied while the weights are in use."""
        self._stream.wait()

    def stored(self, tensor: Tensor) -> Tensor:
        """Return the contents of a parameter or moment: the host copy, sharded in the same way, or the tensor."""
        own = local(tensor)
        for group in (self._frozen, self._weights, self._optimizer):
            if not group.is_resident and (host := group.host_of.get(own.untyped_storage()._cdata)) is not None:
                copy = host.view(own.dtype).as_strided(own.size(), own.stride(), own.storage_offset())
                return with_local(tensor, copy)
        return tensor

    def _acquire(self, groups: list["_Group"]) -> None:
        """Count a user of each group, and move the groups that are on the host to the device."""
        moved = [group for group in groups if not group.is_resident]
        pairs = [pair for group in moved for pair in group.pairs()]
        allocated: list[UntypedStorage] = []
        try:
            for storage, host in pairs:
                storage.resize_(host.nbytes)
                allocated.append(storage)
        except torch.OutOfMemoryError as error:
            for storage in allocated:
                storage.resize_(0)
            size = sum(host.nbytes for _, host in pairs)
            raise out_of_memory(error, f"the move of {size / 2**30:.1f} GiB from the host", self._device) from error
        for group in moved:
            with self._stream():
                for storage, host in group.pairs():
                    _bytes_of(storage, self._device).copy_(host, non_blocking=True)
            if group is not self._optimizer:
                self._stream.wait()
            group.is_resident = True
        for group in groups:
            group.users += 1

    def _release(self, groups: list["_Group"]) -> None:
        """Copy what changed in groups without users to the host, and free their memory on the device."""
        idle = [group for group in groups if group.users == 0 and group.is_resident]
        if not idle:
            return
        reshard(self._model)  # after an error, layers may still be gathered
        for group in idle:
            if group.is_changed or not group.fits_copies():
                group.allocate(self._device)
                with self._stream():
                    for storage, host in group.pairs():
                        host.copy_(_bytes_of(storage, self._device), non_blocking=True)
        self._stream.wait()
        self._stream.synchronize()
        for group in idle:
            for storage, _ in group.pairs():
                storage.resize_(0)
            group.is_resident, group.is_changed = False, False
        if self._optimizer in idle:
            for parameter in self._trained:
                parameter.grad = None  # of an update that failed
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _Group:
    """Tensors that move together, by key, and their copies on the host."""

    def __init__(self, tensors: Callable[[], Iterable[tuple[Hashable, Tensor]]]) -> None:
        self._tensors = tensors
        self._memory: list[HostMemory] = []
        self._copies: dict[Hashable, Tensor] = {}
        self.host_of: dict[int, Tensor] = {}
        self.users, self.is_resident, self.is_changed = 0, True, True

    def pairs(self) -> list[tuple[UntypedStorage, Tensor]]:
        """Return each storage and its copy on the host."""
        return [(storage, self._copies[key]) for key, storage in self._storages().items()]

    def fits_copies(self) -> bool:
        """Return whether each storage has the size of its copy: the first pass of FSDP2 pads shards of uneven size."""
        return all(storage.nbytes() == host.nbytes for storage, host in self.pairs())

    def allocate(self, device: torch.device) -> None:
        """Allocate the missing copies in one block."""
        storages = self._storages()
        sizes = {key: storage.nbytes() for key, storage in storages.items()}
        self._copies = {k: copy for k, copy in self._copies.items() if copy.nbytes == sizes.get(k)}
        if missing := [key for key in storages if key not in self._copies]:
            if not self._copies:
                self._memory.clear()
            self._memory.append(HostMemory([sizes[key] for key in missing], device))
            self._copies |= zip(missing, self._memory[-1].parts, strict=True)
        self.host_of = {storage._cdata: self._copies[key] for key, storage in storages.items()}

    def _storages(self) -> dict[Hashable, UntypedStorage]:
        """Return each storage once; tied tensors share one."""
        found: dict[int, tuple[Hashable, UntypedStorage]] = {}
        for key, tensor in self._tensors():
            own = local(tensor)
            if own.numel():
                storage = own.untyped_storage()
                found.setdefault(storage._cdata, (key, storage))
        return dict(found.values())


def _state_of(
    masters: list[Tensor], optimizer_state: Mapping[Any, dict[str, Any]]
) -> Iterator[tuple[Hashable, Tensor]]:
    yield from enumerate(masters)
    for parameter, moments in optimizer_state.items():
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.ndim:
                yield (id(parameter), name), value


def _bytes_of(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
