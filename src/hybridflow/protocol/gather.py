"""All-gather of a batch over a process group."""

from typing import Any

import torch.distributed as dist

from hybridflow.protocol.batch import tensors_of
from hybridflow.protocol.data_proto import DataProto


def all_gather_data_proto(data: DataProto, process_group: "dist.ProcessGroup | None" = None) -> DataProto:
    """Return a new batch with the rows of all ranks in rank order; None is the default group.

    Ranks may differ in their number of rows and in the lengths that the glossary pads. This is a collective: every
    rank of the group must call it. Every rank raises the same error, as `DataProto.concat` does. Batches pass through
    host memory; the result is on the device of this rank's tensors.
    """
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, data, group=process_group)
    joined = DataProto.concat(gathered)
    device = next((tensor.device for tensor in tensors_of(data.batch).values() if tensor.device.type != "cpu"), None)
    return joined if device is None else joined.to(device)
