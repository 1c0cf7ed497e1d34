"""Iteration over mini-batches for several epochs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hybridflow.errors import BatchError
from hybridflow.protocol.rows import as_count

if TYPE_CHECKING:
    from hybridflow.protocol.data_proto import DataProto

_OPTIONS = ("shuffle", "drop_last")


def iterate_mini_batches(
    data: "DataProto", mini_batch_size: int, epochs: int, seed: int | None, dataloader_kwargs: dict | None
) -> "Iterator[DataProto]":
    """Check the arguments and return the iterator of `DataProto.make_iterator`."""
    size = as_count(mini_batch_size, "mini_batch_size", 1)
    epochs = as_count(epochs, "epochs", 0)
    seed = None if seed is None else as_count(seed, "seed", 0)
    options = dict(dataloader_kwargs or {})
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise BatchError(f"make_iterator: dataloader_kwargs has unknown keys {unknown}; valid are {list(_OPTIONS)}.")
    shuffle = bool(options.get("shuffle", seed is not None))
    if shuffle and seed is None:
        raise BatchError("make_iterator: shuffle=True needs a seed, so that the order is reproducible; pass seed=...")
    if len(data) % size and "drop_last" not in options:
        raise BatchError(
            f"make_iterator: mini_batch_size={size} does not divide the {len(data)} rows; use a divisor, or "
            "dataloader_kwargs={'drop_last': False} for a short last mini-batch, or True to drop its rows."
        )
    stop = len(data) - len(data) % size if options.get("drop_last") else len(data)
    return _iterate(data, size, stop, epochs, seed if shuffle else None)


def _iterate(data: "DataProto", size: int, stop: int, epochs: int, seed: int | None) -> "Iterator[DataProto]":
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = None if generator is None else torch.randperm(len(data), generator=generator)
        for start in range(0, stop, size):
            end = min(start + size, stop)
            yield data.slice(start, end) if order is None else data.select_idxs(order[start:end])
