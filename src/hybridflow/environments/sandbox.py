"""Sandboxes: where commands of a model run. It knows nothing of episodes and rewards.

A sandbox is held by a process that ends as its standard input closes, and with it all that runs inside: so nothing
stays if the process that uses the sandbox is killed. Files are read and written by commands inside, so that a link in
the sandbox leads nowhere else.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hybridflow.errors import EnvironmentConfigError
from hybridflow.runtime.user_import import load_user_function

MAX_OUTPUT_BYTES = 8192
"""Bytes that are kept of each stream of a command, half of them of its beginning and half of its end."""

MAX_FILE_BYTES, LOCAL_BYTES = 2**26, 2**30
"""Bytes of a file that is read, and of all files in a local sandbox, which are in memory."""

MAX_PROCESSES = 256
"""Processes and threads in a sandbox at a time."""

FILE_S, START_S = 60.0, 1200.0
"""Seconds to copy a file, and to build or fetch an image and start its sandbox."""

LATE = 124
"""Exit code of a command that was killed because it took too long, as of timeout(1)."""

_KILLED = (None, -signal.SIGKILL, 128 + signal.SIGKILL)  # here, or by a limit inside

READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.conf.d")
"""Directories and files of this machine that a local sandbox can read."""

_UNPRIVILEGED = 65534
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAMESPACES = ("--user", "--mount", "--net", "--ipc", "--uts")
_SETUP = f"""
set -eu
mount -t tmpfs -o size={LOCAL_BYTES},nr_inodes=200000,mode=755 tmpfs /tmp
cd /tmp
mkdir -p proc dev/shm etc root tmp ".$1"
chmod 1777 tmp dev/shm
for each in {" ".join(READABLE)}; do
    if [ -L $each ]; then cp -P $each .$each; elif [ -d $each ]; then mkdir .$each; mount --rbind -o ro $each .$each; fi
done
for each in ld.so.cache ld.so.conf localtime; do if [ -f /etc/$each ]; then cp -L /etc/$each etc; fi; done
echo root:x:0:0::/root:/bin/sh > etc/passwd
echo root:x:0: > etc/group
echo 127.0.0.1 localhost > etc/hosts
for each in null zero full random urandom; do : > dev/$each; mount --bind /dev/$each dev/$each; done
ln -s /proc/self/fd dev/fd
mount -t proc -o ro,nosuid,nodev,noexec proc proc
ip link set lo up || true
pivot_root . .
umount -l .
cd /
echo ready
exec env -i --ignore-signal=CHLD cat
"""
"""Makes the root of a local sandbox. Its first process leaves no zombies, which would count as processes."""


class SandboxError(EnvironmentConfigError):
    """A sandbox cannot be started, has ended, or cannot read or write a file."""


@dataclass(frozen=True)
class ExecResult:
    """The exit code of a command and what it has written, whose middle is left out where it is long."""

    exit_code: int
    stdout: str
    stderr: str


class Sandbox(Protocol):
    """A place with files and processes of its own, until `close`. All methods may raise SandboxError."""

    async def exec(self, command: Sequence[str] | str, *, timeout_s: float, stdin: str = "") -> ExecResult:
        """Run a command; a text is run by `sh -c`. The exit code is `LATE` if it is killed after its time.

        What it leaves running in the background ends with the sandbox.
        """
        ...

    async def put(self, path: str, content: bytes) -> None:
        """Write a file and its directories."""

    async def get(self, path: str) -> bytes:
        """Return the contents of a file of at most `MAX_FILE_BYTES`."""
        ...

    async def close(self) -> None:
        """End all processes and remove all files."""


def sandbox_of(name: str) -> Callable[..., Sandbox]:
    """Return what makes a sandbox: "local", "docker", "podman" or 'path.py:Class'. Raises EnvironmentConfigError."""
    known: dict[str, Callable[..., Sandbox]] = {"local": LocalSandbox}
    known |= {each: partial(ContainerSandbox, each) for each in ("docker", "podman")}
    if name not in known and ":" not in name:
        raise EnvironmentConfigError(f"sandbox={name!r} is not known; use {', '.join(known)} or 'path.py:Class'.")
    return known.get(name) or load_user_function(name, "sandbox", EnvironmentConfigError, is_class=True)


class Program(asyncio.SubprocessProtocol):
    """A process in a session of its own, and what it writes, of which the beginning (`head`) and the end are kept."""

    transport: Any

    def __init__(self, most: int, head: int) -> None:
        self._most, self._head, loop = most, head, asyncio.get_running_loop()
        self.said, self.ended = loop.create_future(), loop.create_future()
        self.kept, self.num_cut = {1: bytearray(), 2: bytearray()}, {1: 0, 2: 0}
        self._begun, self.is_late = loop.time(), False  # before any clock that it has itself

    @classmethod
    async def start(
        cls, argv: Sequence[str], options: dict[str, Any], most: int = MAX_OUTPUT_BYTES, head: int | None = None
    ) -> "Program":
        """Start a program; half of what is kept is the beginning, by default. Raises SandboxError if it is missing."""
        make = partial(cls, most, most // 2 if head is None else head)
        try:
            return (await asyncio.get_running_loop().subprocess_exec(make, *argv, start_new_session=True, **options))[1]
        except OSError as error:
            raise SandboxError(f"{argv[0]!r} cannot be run: {error.strerror}") from error

    async def wait(self, timeout_s: float, stdin: bytes = b"") -> None:
        """Wait for its end; kill its process group after the time, or if this task is cancelled."""
        pipe = self.transport.get_pipe_transport(0)
        try:
            pipe.write(stdin)
            pipe.close()
            await asyncio.wait({self.ended}, timeout=timeout_s)
        finally:
            too_long = asyncio.get_running_loop().time() - self._begun >= timeout_s
            if not self.ended.done():
                self.kill()
                await asyncio.wait({self.ended}, timeout=FILE_S)
            self.is_late = too_long and self.transport.get_returncode() in _KILLED
            for _ in range(4):  # what it has written is in the pipes, and is read in these steps of the loop
                await asyncio.sleep(0)
            if pipe.get_write_buffer_size():  # it has not read all
                pipe.abort()
            self.transport.close()

    def kill(self) -> None:
        """Kill its process group."""
        with suppress(OSError):
            os.killpg(self.transport.get_pid(), signal.SIGKILL)

    @property
    def exit_code(self) -> int:
        """The command's exit code, or `LATE`."""
        return LATE if self.is_late else self.transport.get_returncode() or 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102  (of the protocol, as below)
        self.transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: D102
        self.kept[fd] += data
        too_many = max(0, len(self.kept[fd]) - self._most)
        del self.kept[fd][self._head : self._head + too_many]
        self.num_cut[fd] += too_many
        if not self.said.done():
            self.said.set_result(None)

    def process_exited(self) -> None:  # noqa: D102  (before the end of pipes that another process has too)
        self.ended.set_result(None)

    def text(self, fd: int) -> str:
        """Return what is kept, with a word in place of what is not."""
        cut = f"\n[... {self.num_cut[fd]:,} bytes are left out ...]\n".encode() if self.num_cut[fd] else b""
        return (self.kept[fd][: self._head] + cut + self.kept[fd][self._head :]).decode(errors="replace")


class _HeldSandbox:
    """A sandbox of commands that begin and hold it, and others that enter it."""

    advice = ""

    def __init__(self, limits: Sequence[str] = (), **options: Any) -> None:
        self._limits, self._options = limits, options  # of the user's commands, and of processes outside
        self._holder: Program | None = None
        self._starting, self._is_closed = asyncio.Lock(), False

    async def exec(self, command: Sequence[str] | str, *, timeout_s: float, stdin: str = "") -> ExecResult:
        argv = ["sh", "-c", command] if isinstance(command, str) else command
        done = await self._run([*self._limits, *argv], timeout_s, stdin.encode())
        late = f"\n[killed after {timeout_s:g} s]\n" if done.is_late else ""
        return ExecResult(done.exit_code, done.text(1), done.text(2) + late)

    async def put(self, path: str, content: bytes) -> None:
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        done = await self._run(["sh", "-c", script, "sh", path], FILE_S, content)
        if done.exit_code:
            raise SandboxError(
                f"{path!r} cannot be written in the sandbox: {done.text(2).strip() or 'it takes too long'}"
            )

    async def get(self, path: str) -> bytes:
        done = await self._run(["head", "-c", str(MAX_FILE_BYTES + 1), "--", path], FILE_S, most=MAX_FILE_BYTES)
        if done.exit_code or done.num_cut[1]:
            large = f"it has more than {MAX_FILE_BYTES:,} bytes" if done.num_cut[1] else "it takes too long"
            raise SandboxError(f"{path!r} cannot be read in the sandbox: {done.text(2).strip() or large}")
        return bytes(done.kept[1])

    async def close(self) -> None:
        self._is_closed = True
        async with self._starting:
            if self._holder:
                await self._holder.wait(0)

    async def _run(self, argv: Sequence[str], timeout_s: float, stdin: bytes = b"", most: int = 0) -> Program:
        async with self._starting:
            if self._is_closed:
                raise SandboxError("the sandbox is closed")
            holder = self._holder = self._holder or await self._start()
        if not holder.ended.done():
            inside = self._inside(argv, timeout_s, holder.transport.get_pid())
            process = await Program.start(inside, self._options, most or MAX_OUTPUT_BYTES)
            await process.wait(timeout_s, stdin)
            if not process.exit_code or not holder.ended.done():
                return process
        raise SandboxError(
            f"the sandbox has ended ({holder.text(2).strip() or 'killed'}); nothing can be run in it any more"
        )

    async def _start(self) -> Program:
        holder = await Program.start(await self._held_by(), self._options)
        try:
            await asyncio.wait({holder.said, holder.ended}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if holder.kept[1] != b"ready\n":
                await holder.wait(0)
        if holder.kept[1] != b"ready\n":
            raise SandboxError(f"a sandbox cannot be started: {holder.text(2).strip() or 'no answer'}; {self.advice}.")
        return holder

    async def _held_by(self) -> Sequence[str]:
        raise NotImplementedError

    def _inside(self, argv: Sequence[str], timeout_s: float, holder: int) -> Sequence[str]:
        raise NotImplementedError


class LocalSandbox(_HeldSandbox):
    """Namespaces of this machine: files in memory, programs of the host, no network, no other processes.

    Commands seem to be root, without its rights.
    """

    advice = (
        "a local one needs Linux, util-linux and namespaces of users (user.max_user_namespaces > 0, on Ubuntu "
        "kernel.apparmor_restrict_unprivileged_userns=0, in a container the rights for them); or use another one"
    )

    def __init__(self, workdir: str = "/root") -> None:
        as_another = {"user": _UNPRIVILEGED, "group": _UNPRIVILEGED, "extra_groups": []} if os.getuid() == 0 else {}
        limits = ("prlimit", "--core=0", f"--nproc={MAX_PROCESSES}")
        super().__init__(limits, cwd="/", env={"PATH": _PATH}, **as_another)
        self._workdir = workdir

    async def _held_by(self) -> Sequence[str]:
        spaces = ("--map-root-user", "--pid", "--fork", "--kill-child", *_NAMESPACES)
        return ["unshare", *spaces, "sh", "-c", _SETUP, "sh", self._workdir]

    def _inside(self, argv: Sequence[str], timeout_s: float, holder: int) -> Sequence[str]:
        del timeout_s
        spaces = (f"--target={holder}", f"--pid=/proc/{holder}/ns/pid_for_children", *_NAMESPACES)
        rights = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
        variables = ("env", "-i", f"--chdir={self._workdir}", "HOME=/root", "LANG=C.UTF-8", f"PATH={_PATH}")
        return ["nsenter", *spaces, "--preserve-credentials", "--", *rights, *variables, *argv]


class ContainerSandbox(_HeldSandbox):
    """A container of the Docker or Podman command line (`binary`), of `image` or of what `context` builds.

    `workdir`: that of the image by default. `options`: more options of `docker run`.
    """

    advice = "see whether the same image runs with this command line"

    def __init__(
        self,
        binary: str,
        *,
        image: str = "",
        context: Path | None = None,
        workdir: str = "",
        network: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not image and context is None:
            raise EnvironmentConfigError(f"sandbox={binary!r} needs an image: its name, or a directory to build.")
        self._binary, self._image, self._context = binary, image, context
        self._name = f"hybridflow-{secrets.token_hex(8)}"
        self._flags = [*options, "--pids-limit", str(MAX_PROCESSES), *([] if network else ["--network", "none"])]
        self._flags += ["--workdir", workdir] if workdir else []

    async def _held_by(self) -> Sequence[str]:
        if not self._image:
            built = await Program.start([self._binary, "build", "--quiet", str(self._context)], {})
            await built.wait(START_S)
            if built.exit_code:
                problem = built.text(2).strip()
                raise SandboxError(f"{self._binary} cannot build the image of {str(self._context)!r}: {problem}")
            self._image = built.text(1).split()[-1]
        run = (self._binary, "run", "--interactive", "--rm", "--name", self._name, *self._flags)
        return [*run, "--entrypoint", "sh", self._image, "-c", "echo ready; exec cat"]

    def _inside(self, argv: Sequence[str], timeout_s: float, holder: int) -> Sequence[str]:
        del holder  # if this client is killed, the command goes on: so it has a limit of its own
        return [self._binary, "exec", "--interactive", self._name, "timeout", "-s", "KILL", f"{timeout_s:g}", *argv]

    async def close(self) -> None:
        """Remove the container."""
        await super().close()
        if self._holder:
            removing = await Program.start([self._binary, "rm", "--force", self._name], {})
            await removing.wait(FILE_S)
