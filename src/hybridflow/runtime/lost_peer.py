"""PyTorch's errors of collective operations in which another rank died or timed out."""

import sys


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective operation failed because of another rank; its own error or log has the cause."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in " ".join(str(error).split())[:300].lower()
