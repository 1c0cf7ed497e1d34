"""The child's half of the protocol: requests on stdin, replies on a separate pipe, one JSON object per line.

Standard library only, since it runs in the peers' environments. Output of libraries goes to the side's log.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Channel:
    """The connection to the parent, which passes the pipe for replies and the options on the command line."""

    def __init__(self) -> None:
        descriptor = int(sys.argv[1])
        os.set_inheritable(descriptor, False)
        self._replies = os.fdopen(descriptor, "w")
        self.options: dict[str, Any] = json.loads(sys.argv[2])

    def ready(self, threads: int, **versions: str) -> None:
        """Send the first reply: the number of threads of the side, and the versions of its packages."""
        self.reply(threads=threads, versions=versions)

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield each request, waiting idle in between, until the parent closes the channel."""
        while line := sys.stdin.readline():
            yield json.loads(line)

    def reply(self, **result: Any) -> None:
        """Send one reply."""
        self._replies.write(json.dumps(result) + "\n")
        self._replies.flush()


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process; getrusage would include its parent's at the start."""
    status = Path("/proc/self/status")
    if not status.exists():
        raise RuntimeError("/proc/self/status does not exist: peak memory is read from it; run the benchmark on Linux.")
    sizes = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(sizes[0]) * 1024
