"""Pickling of a batch: a small structure in the stream, the bytes of each column once, out of band with protocol 5."""

from typing import TYPE_CHECKING

from hybridflow.protocol.packed_batch import PackedBatch

if TYPE_CHECKING:
    from hybridflow.protocol.data_proto import DataProto


def reduce_batch(data: "DataProto") -> tuple:
    """Return the value of `__reduce_ex__`. A view sends only its rows; tensors are detached and arrive on the CPU."""
    return _read, (PackedBatch.pack(data),)


def _read(packed: PackedBatch) -> "DataProto":
    return packed.read()
