"""Heartbeats: each worker process counts its beats and its progress, and the driver notes when a count last changed.

worker   every second: "BEAT PROGRESS" -> a key in the key-value storage of the Ray cluster
driver   during a wait of some seconds: reads the keys of the processes that it waits for

Only counts are compared, never the clocks of two machines. Seconds are those in which the driver looked regularly, so
that they do not grow while the driver itself is stopped, or while the storage does not answer.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import ray
from ray.exceptions import RayError, RpcError
from ray.experimental import internal_kv

from hybridflow.controller.ray.processes import RayProcess
from hybridflow.runtime.progress import progress

BEAT_EVERY_S = 1.0
LOOK_EVERY_S = 1.0

LONGEST_GAP_S = 2.0
"""Seconds between two looks that count at most; in a longer gap the driver did not run, or could not read."""

_NAMESPACE = b"hybridflow"
_TIMEOUT_S = 1.0


def start_heartbeat() -> None:
    """Start the thread of this worker process that writes its beats, until the driver has deleted the key."""
    key = _key(ray.get_runtime_context().get_actor_id() or "")
    threading.Thread(target=_beat, args=(key,), name="heartbeat", daemon=True).start()


def _beat(key: bytes) -> None:
    has_begun = False
    for beat in count(1):
        with contextlib.suppress(Exception):  # the storage may be away for a while
            if has_begun and not _storage().internal_kv_exists(key, _NAMESPACE, _TIMEOUT_S):
                return  # the driver has deleted the key, to stop this process, which may end at any line from here
            record = f"{beat} {progress()}".encode()
            is_added = _storage().internal_kv_put(key, record, True, _NAMESPACE, _TIMEOUT_S)
            if is_added and has_begun:  # it was deleted just now
                _storage().internal_kv_del(key, False, _NAMESPACE, _TIMEOUT_S)
                return
            has_begun = True
        time.sleep(BEAT_EVERY_S)


def delete_heartbeat(process: RayProcess) -> None:
    """Delete the key of a process that is stopped."""
    with contextlib.suppress(RayError):  # a process that leaves a key behind is not an error
        _storage().internal_kv_del(_key_of(process), False, _NAMESPACE, _TIMEOUT_S)


@dataclass
class _Seen:
    """The driver's view of a process: its last record (beat 0: none), and the seconds since a count changed."""

    looked_at: float
    beat: int = 0
    progress: int = 0
    silent_s: float = 0.0
    idle_s: float = 0.0


class Heartbeats:
    """The driver's view of the heartbeats; several threads may use it."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[RayProcess, _Seen] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def look(self, processes: Sequence[RayProcess], *, again: bool = False) -> None:
        """Read the records of these processes, each at most once in `LOOK_EVERY_S`, unless `again`."""
        with self._lock:
            before = float("inf") if again else time.monotonic() - LOOK_EVERY_S
            due = [p for p in processes if p not in self._seen or self._seen[p].looked_at <= before]
            if not due:
                return
            try:
                records = _storage().internal_kv_multi_get([_key_of(p) for p in due], _NAMESPACE, _TIMEOUT_S)
            except RpcError:
                records = None
            for process in due:
                self._note(process, None if records is None else records.get(_key_of(process), b""))

    def _note(self, process: RayProcess, record: bytes | None) -> None:
        """Note a record that was read just now; b"": there is none, None: it could not be read."""
        now = time.monotonic()
        seen = self._seen.setdefault(process, _Seen(now))
        counted_s, seen.looked_at = min(now - seen.looked_at, LONGEST_GAP_S), now
        if record is None:
            return
        beat, done = map(int, record.split()) if record else (seen.beat, seen.progress)
        seen.silent_s = 0.0 if beat != seen.beat else seen.silent_s + counted_s
        seen.idle_s = 0.0 if done != seen.progress else seen.idle_s + counted_s
        seen.beat, seen.progress = beat, done

    def silent_s(self, process: RayProcess) -> float:
        """Return the seconds without a beat; 0 before the first beat was seen."""
        seen = self._seen.get(process)
        return seen.silent_s if seen and seen.beat else 0.0

    def idle_s(self, process: RayProcess) -> float:
        """Return the seconds without progress; infinite before the first beat was seen."""
        seen = self._seen.get(process)
        return seen.idle_s if seen and seen.beat else float("inf")


def _key_of(process: RayProcess) -> bytes:
    return _key(process.actor._actor_id.hex())


def _key(actor_id: str) -> bytes:
    return f"heartbeats/{actor_id}".encode()


def _storage() -> Any:
    return internal_kv.internal_kv_get_gcs_client()
