"""Two network namespaces of this machine with a link between them that delays each packet.

    namespace "near" ── device ── relay: holds each packet for some milliseconds ── device ── namespace "far"

Programs in one reach those in the other by its address, as on two machines. It needs Linux, root and `ip`.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from support.errors import BenchmarkError

NEAR, FAR, ALSO_NEAR = "10.77.0.1", "10.77.0.2", "10.77.0.3"
MTU = 65000

RELAY = """
import ctypes, fcntl, os, select, struct, sys, time
from collections import deque

def device_in(namespace, name):
    # a device belongs to the namespace that the thread is in when it opens it
    if ctypes.CDLL(None, use_errno=True).setns(os.open("/var/run/netns/" + namespace, os.O_RDONLY), 0x40000000):
        raise OSError(ctypes.get_errno(), "setns " + namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22s", name.encode(), 0x1001, b""))  # TUNSETIFF
    return device

delay_s = float(sys.argv[1])
devices = [device_in(namespace, "link") for namespace in sys.argv[2:4]]
others = dict(zip(devices, reversed(devices)))
waiting = deque()  # (when due, device, packet)
print("ready", flush=True)
while True:
    timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
    readable, _, _ = select.select([*devices, sys.stdin], [], [], timeout)
    if sys.stdin in readable:
        break  # it is closed
    for device in readable:
        try:
            while True:
                waiting.append((time.monotonic() + delay_s, others[device], os.read(device, 1 << 16)))
        except BlockingIOError:
            pass
    while waiting and waiting[0][0] <= time.monotonic():
        _, device, packet = waiting.popleft()
        try:
            os.write(device, packet)
        except OSError:
            pass  # a full queue loses packets, as links do
"""


@dataclass(frozen=True)
class Namespaces:
    """The names of the two namespaces."""

    near: str
    far: str

    def command(self, namespace: str, command: list[str]) -> list[str]:
        """Return the command that runs another one in a namespace."""
        return ["ip", "netns", "exec", namespace, *command]


def missing() -> str:
    """Return what this machine lacks for a delayed link, "" if nothing."""
    if shutil.which("ip") is None:
        return "the command 'ip' (Debian: apt install iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "the device /dev/net/tun"
    probe = f"hf-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode:
        return f"the right to make network namespaces ({done.stderr.strip()})"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


@contextmanager
def delayed_link(delay_s: float) -> Iterator[Namespaces]:
    """Yield two namespaces whose link delays each packet by `delay_s`, so that a round trip takes twice as long.

    The near one has the addresses NEAR and ALSO_NEAR, the far one FAR. Raises BenchmarkError if the machine cannot.
    """
    if lack := missing():
        raise BenchmarkError(f"a delayed link needs {lack}.")
    names = Namespaces(f"hf-near-{os.getpid()}", f"hf-far-{os.getpid()}")
    with ExitStack() as undo:
        for name in (names.near, names.far):
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "delete", name)
        relay = subprocess.Popen(
            [sys.executable, "-c", RELAY, str(delay_s), names.near, names.far],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        undo.enter_context(relay)  # closes its input, at which it ends
        assert relay.stdout is not None
        if relay.stdout.readline() != "ready\n":
            raise BenchmarkError("the relay of a delayed link did not start.")
        for name, addresses in ((names.near, (NEAR, ALSO_NEAR)), (names.far, (FAR,))):
            for address in addresses:
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "link")
            _ip("-n", name, "link", "set", "dev", "link", "mtu", str(MTU), "up")
            _ip("-n", name, "link", "set", "dev", "lo", "up")
        yield names


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"'ip {' '.join(arguments)}' failed: {done.stderr.strip()}")
