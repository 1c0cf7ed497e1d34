"""What a process notes about itself for an observer on its node: a heartbeat, its present call, its stacks on request.

All of it lies in memory files, which end with the process whatever ends it, SIGKILL included. `process_report` opens
them through /proc. Where the system has neither, nothing is noted, and the address says so.

The stacks come in one of two ways. Asked through a pipe, the thread of the heartbeat writes them, holding the
interpreter lock. If it cannot have the lock, a signal's handler in C writes them without: safe only then, because
reading the frames of a thread that is running Python ends in a segmentation fault now and then.
"""

import faulthandler
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import threading
import time
from binascii import crc32
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hybridflow.errors import WorkerError

STACKS_NAME, RECORD_NAME = "hybridflow-stacks", "hybridflow-record"
STACK_SIGNAL = signal.SIGUSR1

# Each part of the record has two slots that are written in turn, each with a checksum. A reader takes the newer one
# that is whole, so it never needs the writer to go on: that may be stopped or killed in the middle of a slot.
_CHECKSUM = struct.Struct("<I")
_HEARTBEAT = struct.Struct("<Qdd?")  # sequence, time.monotonic(), interval_s, whether STACK_SIGNAL is still ours
_CALL = struct.Struct("<QdH?400s")  # sequence, time.monotonic() of its start or end, len(what), is present, what
_SLOT_BYTES = 512
_RECORD_BYTES = 4 * _SLOT_BYTES
_MAX_STACK_BYTES = 2**24


@dataclass(frozen=True)
class PulseAddress:
    """Where an observer on the same node finds what a process notes about itself."""

    pid: int
    start_ticks: int | None
    """Field 22 of /proc/<pid>/stat: a later process with the same pid has another one. None without /proc."""
    hostname: str
    pid_namespace: str
    """The link /proc/<pid>/ns/pid: in another container the same pid is another process."""
    stack_fd: int | None
    record_fd: int | None
    request_fd: int | None
    """The reading end of the pipe: a byte written to it asks for the stacks."""
    log_paths: tuple[str, ...]
    nothing_because: str = ""
    """The end of a sentence, where the three descriptors are None."""


@dataclass(frozen=True)
class PulseRecord:
    """What `Pulse` last noted. Times are of time.monotonic(), one clock for all processes of a node."""

    heartbeat_at: float
    interval_s: float
    owns_signal: bool
    """Whether STACK_SIGNAL asks for the stacks, rather than for what another handler in the process does."""
    what: str
    """The present call, or the last one, or "" if there was none yet."""
    is_present: bool
    since: float
    """When the present call began or the last one ended."""


class Pulse:
    """The notes of this process; one at a time, because SIGUSR1, which asks for the stacks, is the whole process's.

    Around calls that run on one thread, `begin` and `end`, or `during`, say what the process is in; they may nest, cost
    microseconds, and before `start` reach nobody.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._address: PulseAddress | None = None
        self._record: mmap.mmap | None = None
        self._heartbeats, self._notes = count(1), count(1)
        self._calls: list[tuple[str, float]] = []
        self._found_handler: object = None
        self._wake_fd: int | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> PulseAddress:
        """What `report_process` needs; picklable. Raises WorkerError before `start` and after `stop`."""
        if self._address is None:
            raise WorkerError("Pulse.address exists between start() and stop(); call start() first.")
        return self._address

    def start(self, log_path: str | None = None) -> None:
        """Begin to note. `log_path` is a file this process logs to besides stdout and stderr."""
        global _started
        if _started is not None and _started.address.pid == os.getpid():  # a forked child may start its own
            raise WorkerError(f"process {os.getpid()} already has a Pulse; call its stop() before another start().")
        start_ticks, pid_namespace, fds, nothing_because = None, "", (None, None, None), ""
        try:
            start_ticks, pid_namespace = _read_start_ticks(), os.readlink("/proc/self/ns/pid")
            fds = self._open_files()
        except (OSError, AttributeError) as error:  # macOS has neither, and a sandbox may forbid one of them
            self._record = None
            nothing_because = f"its system has no /proc or no memory files ({error})."
        self._address = PulseAddress(
            pid=os.getpid(),
            start_ticks=start_ticks,
            hostname=socket.gethostname(),
            pid_namespace=pid_namespace,
            stack_fd=fds[0],
            record_fd=fds[1],
            request_fd=fds[2],
            log_paths=_log_paths(log_path),
            nothing_because=nothing_because,
        )
        _started = self
        if fds[0] is not None and fds[2] is not None:
            self._take_signal(fds[0])
            self._note_heartbeat()
            self._note_call()
            self._stopping = False
            self._thread = threading.Thread(target=self._beat, args=(fds[0], fds[2]), name="pulse", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the heartbeat and give the memory back.

        SIGUSR1 is then ignored, so that a late one harms nobody; after a start outside the main thread it is as before.
        """
        global _started
        if self._address is None:
            return
        if self._thread is not None and self._wake_fd is not None and self._record is not None:
            self._stopping = True
            with suppress(BlockingIOError):  # full of requests, which wake the thread as well
                os.write(self._wake_fd, b"\n")
            self._thread.join()
            if self._found_handler is not None:
                faulthandler.unregister(STACK_SIGNAL)
            self._record.close()
            for fd in (self._address.stack_fd, self._address.record_fd, self._address.request_fd, self._wake_fd):
                if fd is not None:
                    os.close(fd)
        self._address = self._record = self._thread = self._wake_fd = self._found_handler = _started = None

    def begin(self, what: str) -> tuple[str, float]:
        """From now on the process is in `what`, of which an observer sees the first 400 bytes; give the result to `end`
        where several are going on in threads."""
        call = (what, time.monotonic())
        self._calls.append(call)
        self._note_call()
        return call

    def end(self, call: tuple[str, float] | None = None) -> None:
        """This `begin` is over, by default the innermost; without one, nothing happens."""
        with suppress(ValueError, IndexError):
            if call is None:
                call = self._calls.pop()
            else:
                self._calls.remove(call)
            self._note_call(last=call[0])

    def during(self, what: str) -> "_During":
        """`begin` and `end` around a block, whether or not it raises."""
        return _During(self, what)

    def _open_files(self) -> tuple[int, int, int]:
        record_fd = os.memfd_create(RECORD_NAME)
        os.ftruncate(record_fd, _RECORD_BYTES)
        self._record = mmap.mmap(record_fd, _RECORD_BYTES)
        stack_fd = os.memfd_create(STACKS_NAME)
        # faulthandler writes where its descriptor stands; appending, it starts at 0 after an observer truncates.
        fcntl.fcntl(stack_fd, fcntl.F_SETFL, fcntl.fcntl(stack_fd, fcntl.F_GETFL) | os.O_APPEND)
        request_fd, self._wake_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return stack_fd, record_fd, request_fd

    def _take_signal(self, stack_fd: int) -> None:
        if signal.getsignal(STACK_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
            return  # job schedulers and vllm use it too: whoever was first keeps it
        faulthandler.unregister(STACK_SIGNAL)  # a registration that exists would keep the handler from being installed
        with suppress(ValueError):  # outside the main thread
            # faulthandler puts this back when the interpreter ends, and a late signal then does not kill.
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True, chain=False)
        self._found_handler = signal.getsignal(STACK_SIGNAL)

    def _beat(self, stack_fd: int, request_fd: int) -> None:
        requests = select.poll()
        requests.register(request_fd, select.POLLIN)
        while True:
            is_asked = bool(requests.poll(self._interval_s * 1000))
            if self._stopping:
                return
            self._note_heartbeat()
            if is_asked:
                os.read(request_fd, 4096)
                faulthandler.dump_traceback(stack_fd, all_threads=True)
            elif os.fstat(stack_fd).st_size > _MAX_STACK_BYTES:
                os.ftruncate(stack_fd, 0)  # a stranger keeps sending the signal

    def _note_heartbeat(self) -> None:
        owns_signal = self._found_handler is not None and signal.getsignal(STACK_SIGNAL) == self._found_handler
        sequence = next(self._heartbeats)
        self._write(0, sequence, _HEARTBEAT.pack(sequence, time.monotonic(), self._interval_s, owns_signal))

    def _note_call(self, last: str = "") -> None:
        newest = self._calls[-1:]
        what, since = newest[0] if newest else (last, time.monotonic())
        data = what.encode("utf-8", "replace")[:400]
        sequence = next(self._notes)
        self._write(2, sequence, _CALL.pack(sequence, since, len(data), bool(newest), data))

    def _write(self, first_slot: int, sequence: int, body: bytes) -> None:
        if self._record is not None:
            # Through the mapping: a system call would release the interpreter lock, and wait to have it back.
            start = (first_slot + sequence % 2) * _SLOT_BYTES
            self._record[start : start + _CHECKSUM.size + len(body)] = _CHECKSUM.pack(crc32(body)) + body


class _During:
    __slots__ = ("_call", "_pulse", "_what")

    def __init__(self, pulse: Pulse, what: str) -> None:
        self._pulse, self._what = pulse, what

    def __enter__(self) -> None:
        self._call = self._pulse.begin(self._what)

    def __exit__(self, *exc_info: object) -> None:
        self._pulse.end(self._call)


_started: Pulse | None = None


def decode_record(data: bytes) -> PulseRecord | None:
    """The record in the bytes of its memory file; None where a part has no whole slot, which reading again repairs."""
    heartbeat, call = _newest(data, 0, _HEARTBEAT), _newest(data, 2, _CALL)
    if heartbeat is None or call is None:
        return None
    _, heartbeat_at, interval_s, owns_signal = heartbeat
    _, since, what_len, is_present, what = call
    return PulseRecord(
        heartbeat_at=heartbeat_at,
        interval_s=interval_s,
        owns_signal=owns_signal,
        what=what[:what_len].decode("utf-8", "ignore"),  # the cut may have split a character
        is_present=is_present,
        since=since,
    )


def _newest(data: bytes, first_slot: int, layout: struct.Struct) -> tuple | None:
    whole = []
    for slot in (first_slot, first_slot + 1):
        slot_data = data[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]
        if len(slot_data) == _SLOT_BYTES:
            body = slot_data[_CHECKSUM.size : _CHECKSUM.size + layout.size]
            if _CHECKSUM.unpack_from(slot_data) == (crc32(body),):
                whole.append(layout.unpack(body))
    return max(whole, default=None)  # the sequence comes first


def _read_start_ticks() -> int:
    # The second field is a name in parentheses, which may itself hold spaces and parentheses.
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def _log_paths(log_path: str | None) -> tuple[str, ...]:
    """`log_path`, then stdout and stderr where they are files that still have a name; each once."""
    paths = [] if log_path is None else [os.path.abspath(log_path)]
    for fd in (1, 2):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if os.path.isfile(path) and os.path.samestat(os.stat(path), os.fstat(fd)):
                paths.append(path)
    return tuple(dict.fromkeys(paths))
