"""Notices that the cluster's control service (GCS) or this node's raylet has died, or is stopped for long.

Ray ends the process a minute after the death of the GCS, in native code, without an error that could be handled.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from typing import Any

import psutil
import ray._private.worker

from hybridflow.errors import LostClusterError

PROBE_EVERY_S = 1.0

PATIENCE_S = 30.0
"""Seconds without a connection until the services of a cluster count as lost: an external GCS may be restarted."""

PATIENCE_LOCAL_S = 5.0
"""`PATIENCE_S` of a local cluster, whose services are not restarted."""

STOPPED_PATIENCE_S = 60.0
"""Seconds for which a service of a local cluster may be stopped (SIGSTOP) until it counts as lost."""

LAST_RESORT_S = 50.0
"""Seconds without a connection after which the watch ends the process itself, since Ray does after 60."""

_AGAIN = 75  # the exit status after which the same command can be run again; see cli/exit_codes.py


class ClusterWatch:
    """A thread that looks at the GCS and at this node's raylet every second, until `stop` or `ray.shutdown`.

    `require_cluster` raises an error once they have refused for long. If it was not called shortly before Ray would
    end the process, because the process waits in native code of Ray, the thread ends it with a message.
    """

    def __init__(self, *, is_local: bool) -> None:
        self._node: Any = ray._private.worker._global_node
        host, _, port = self._node.gcs_address.rpartition(":")
        self._services = {
            f"the control service of the Ray cluster (GCS, {self._node.gcs_address})": (host.strip("[]"), int(port)),
            "the raylet of this node": self._node.raylet_socket_name,
        }
        started = [self._node.all_processes.get(name) for name in ("gcs_server", "raylet")]  # by this process
        self._pids = {n: s and s[0].process.pid for n, s in zip(self._services, started, strict=True)}
        self._patience_s = PATIENCE_LOCAL_S if is_local else PATIENCE_S
        self._stopped = threading.Event()
        self._lost = ""
        self._is_noticed = False
        self._thread = threading.Thread(target=self._watch, name="cluster watch", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this process is still connected to the cluster, which `ray.shutdown` leaves."""
        return ray._private.worker._global_node is self._node

    @property
    def is_lost(self) -> bool:
        """Whether a service has been gone for long."""
        return bool(self._lost)

    def require_cluster(self) -> None:
        """Raise LostClusterError if a service has been gone for long."""
        if self._lost:
            self._is_noticed = True
            raise LostClusterError(self._lost)

    def wait_for_cluster(self) -> None:
        """Wait until every service answers; raise LostClusterError once one has been gone or stopped for long."""
        while self._thread.is_alive() and not all(map(self._answers, self._services)):
            self.require_cluster()
            time.sleep(PROBE_EVERY_S / 10)
        self.require_cluster()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        reached = dict.fromkeys(self._services, time.monotonic())
        while not self._stopped.wait(PROBE_EVERY_S) and self.is_current:
            for name in self._services:
                now, is_stopped = time.monotonic(), _is_stopped(self._pids[name])
                if self._answers(name):
                    reached[name] = now
                patience_s = STOPPED_PATIENCE_S if is_stopped else self._patience_s
                if now - reached[name] > patience_s and not self._lost:
                    what = "is stopped: it has not run" if is_stopped else "has died: it has not accepted a connection"
                    self._lost = f"{name} {what} for {now - reached[name]:.0f} s. The workers of the run are lost."
                elif now - reached[name] > max(LAST_RESORT_S, 1.5 * patience_s) and not self._is_noticed:
                    _end_process(self._lost)

    def _answers(self, name: str) -> bool:
        """Return whether a service runs and accepts a connection, as a stopped one does too."""
        return not _is_stopped(self._pids[name]) and _accepts(self._services[name])


def _is_stopped(pid: int | None) -> bool:
    """Return whether a process of this machine is stopped (SIGSTOP); False if this process has no free file to look."""
    try:
        return pid is not None and psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:  # it has ended
        return False
    except OSError as error:
        _require_no_free_file(error)
        return False


def _require_no_free_file(error: OSError) -> None:
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        raise error


def _accepts(address: tuple[str, int] | str) -> bool:
    """Return whether a service listens on HOST and PORT or on a unix socket; True if this process has no free file."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        unconnected = socket.socket(family)
    except OSError as error:
        _require_no_free_file(error)
        return True  # the service cannot be asked, which says nothing of it
    with contextlib.closing(unconnected) as probe:
        probe.settimeout(PROBE_EVERY_S)
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


def _end_process(problem: str) -> None:
    text = (
        f"error: {problem} The process waits for Ray and ends now; the same command continues from the last checkpoint."
    )
    os.write(2, f"{text}\n".encode())
    os._exit(_AGAIN)
