"""The shard of a tensor that is sharded over ranks, and a sharded tensor whose shard is on the host."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Any) -> Any:
    """Return this rank's shard of a tensor; a tensor that is not sharded, or None, is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(like: Tensor, shard: Tensor) -> Tensor:
    """Return `shard` as the shard of a DTensor that is sharded as `like`; unchanged if `like` is not a DTensor.

    Without communication or a copy: a shard on the host stays there, whatever the device of the mesh. The result can be
    read, as by `torch.distributed.checkpoint`, but not computed with.
    """
    return DTensor(shard, like._spec, requires_grad=False) if isinstance(like, DTensor) else shard
