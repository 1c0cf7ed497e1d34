"""All-gather of a batch over a process group."""

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from hybridflow.errors import FieldError
from hybridflow.protocol.batch import tensors_of
from hybridflow.protocol.data_proto import DataProto


def all_gather_data_proto(data: DataProto, process_group: "dist.ProcessGroup | None" = None) -> DataProto:
    """Return a new batch with the rows of all ranks in rank order; None is the default group.

    Ranks may differ in their number of rows and in the lengths that the glossary pads. This is a collective: every
    rank of the group must call it. Every rank raises the same error, as `DataProto.concat` does.
    """
    data.check_consistency()
    tensors = tensors_of(data.batch)
    rest = data.select(batch_keys=())
    description = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, (description, rest), group=process_group)
    for rank, (columns, _) in enumerate(gathered):
        if columns.keys() != gathered[0][0].keys():
            raise FieldError(
                f"all_gather: rank 0 has the tensors {sorted(gathered[0][0])}, rank {rank} has {sorted(columns)}; "
                "give all ranks the same columns (select)."
            )
    columns_of_ranks: list[dict[str, torch.Tensor]] = [{} for _ in gathered]
    for name in gathered[0][0]:
        specs = [columns[name] for columns, _ in gathered]
        for rank, tensor in enumerate(_gather_tensors(tensors[name], specs, process_group)):
            columns_of_ranks[rank][name] = tensor
    device = None if data.batch is None else data.batch.device
    parts = []
    for (_, part), columns in zip(gathered, columns_of_ranks, strict=True):
        if part.batch is not None:
            part.batch = TensorDict(columns, part.batch.batch_size, device=device)
        parts.append(part)
    return DataProto.concat(parts)


def _gather_tensors(
    tensor: torch.Tensor, specs: list[tuple[tuple[int, ...], torch.dtype]], group: "dist.ProcessGroup | None"
) -> list[torch.Tensor]:
    """Gather the tensor of every rank as bytes, padded to the largest size, since collectives need equal sizes."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in specs]
    device = _collective_device(tensor.device, group)
    mine = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    if tensor.numel():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        mine[: flat.numel()] = flat.to(device)
    buffers = [torch.empty_like(mine) for _ in specs]
    if max(sizes):
        dist.all_gather(buffers, mine, group=group)
    return [
        buffer[:size].view(dtype).reshape(shape).to(tensor.device) if size else tensor.new_empty(shape, dtype=dtype)
        for buffer, size, (shape, dtype) in zip(buffers, sizes, specs, strict=True)
    ]


def _collective_device(device: torch.device, group: "dist.ProcessGroup | None") -> torch.device:
    """Return the device that the group's backend communicates from: this process's GPU for nccl, the CPU for gloo."""
    backends = dist.get_backend_config(group)
    if "nccl" not in backends:
        return torch.device("cpu")
    if "gloo" in backends or device.type == "cuda":
        return device
    return torch.device("cuda", torch.cuda.current_device())
