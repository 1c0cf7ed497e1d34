"""Copies between the host and the device of an engine, which the host does not wait for."""

import torch
from torch import Tensor

from hybridflow.protocol import DataProto


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device. On CUDA the copy is made from pinned memory, beside other work of the device."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # An expanded tensor, several of whose elements share memory, cannot be pinned.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def rows_to_device(rows: DataProto, device: torch.device) -> DataProto:
    """Return the rows with their tensors on the device, copied by `to_device`; numpy columns stay on the CPU."""
    if device.type == "cpu" or rows.batch is None:
        return rows.to(device)
    batch = rows.batch.apply(lambda column: to_device(column, device), device=device)
    return type(rows)(batch, rows.non_tensor_batch, rows.meta_info, rows.auto_padding)  # pyright: ignore


def wait_for_copies(device: torch.device) -> None:
    """Wait until all copies from the device to the host have arrived."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
