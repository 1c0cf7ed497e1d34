"""`RayStore`: a store of torch.distributed in the key-value storage of the Ray cluster.

torch's TCPStore lets everyone who can connect read and write it. This one is as protected as the cluster.
"""

import time
from datetime import timedelta
from itertools import count

from ray.experimental import internal_kv
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

_NAMESPACE = "hybridflow"
_TIMEOUT = timedelta(seconds=300)  # as that of torch's stores
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


class RayStore(Store):
    """A store shared by all processes of the cluster that open the same `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value under a key."""
        internal_kv._internal_kv_put(self._full(key), value, namespace=_NAMESPACE)

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it. Raises DistStoreError after five minutes."""
        self.wait([key])
        return internal_kv._internal_kv_get(self._full(key), namespace=_NAMESPACE)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, atomically, and return the sum."""
        total = 0
        for index in count():  # each addition takes the first free entry
            entry = self._full(f"{key}/{index}")
            if not internal_kv._internal_kv_put(entry, str(amount), overwrite=False, namespace=_NAMESPACE):
                self.set(key, str(total + amount))
                return total + amount
            total += int(internal_kv._internal_kv_get(entry, namespace=_NAMESPACE))
        raise AssertionError  # for the type checker: `count` does not end

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return all(internal_kv._internal_kv_exists(self._full(key), namespace=_NAMESPACE) for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = _TIMEOUT) -> None:
        """Wait until all keys exist. Raises DistStoreError after the timeout."""
        deadline, pause_s = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE_S
        while keys := [key for key in keys if not self.check([key])]:
            if time.monotonic() > deadline:
                raise DistStoreError(f"no process has set {', '.join(keys)} within the time limit")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return internal_kv._internal_kv_del(self._full(key), namespace=_NAMESPACE) > 0

    def _full(self, key: str) -> str:
        return f"{self._name}/{key}"


def delete_stores(prefix: str) -> None:
    """Delete the contents of all stores whose names start with the prefix."""
    internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=_NAMESPACE)
