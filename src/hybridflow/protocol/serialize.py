"""A batch as pickle sees it: small structure in the stream, every column's bytes once, out of band with protocol 5."""

from typing import TYPE_CHECKING

from hybridflow.protocol.packed_batch import PackedBatch

if TYPE_CHECKING:
    from hybridflow.protocol.data_proto import DataProto


def reduce_batch(data: "DataProto") -> tuple:
    """What `__reduce_ex__` returns. A view ships its own rows only; tensors travel detached and arrive on the CPU."""
    return _read, (PackedBatch.pack(data),)


def _read(packed: PackedBatch) -> "DataProto":
    return packed.read()
