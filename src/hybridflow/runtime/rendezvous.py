"""Stores through which the ranks of a process group find each other, and the errors by which they lose each other.

The backend of a worker process provides stores that other users cannot reach. A process without a backend has stores
of its own, shared by its threads.
"""

import secrets
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@cache
def _store_of_this_process(_: str) -> "Store":
    from torch._C._distributed_c10d import HashStore

    return HashStore()


_open: "Callable[[str], Store]" = _store_of_this_process
_group = ""


def provide_stores(open_: "Callable[[str], Store]", group: str) -> None:
    """Set how this process opens stores, and the name of the store of its worker group."""
    global _open, _group
    _open, _group = cache(open_), group


def group_store() -> "Store | None":
    """Return the store that all ranks of this process's worker group share; None outside of a worker group."""
    return open_store(_group) if _group else None


def new_store_name() -> str:
    """Return the name of a store that no other process uses."""
    return f"{_group}/{secrets.token_hex(8)}"


def open_store(name: str) -> "Store":
    """Return the store of this name; processes of one driver that open the same name share its contents.

    It stays open until the process ends, as its process group needs it.
    """
    return _open(name)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective operation failed because of another rank; its own error or log has the cause."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in " ".join(str(error).split())[:300].lower()
