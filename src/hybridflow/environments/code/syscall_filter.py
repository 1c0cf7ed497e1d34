"""Seccomp filters for programs written by a model, on x86_64 and aarch64.

The strict filter allows the system calls that the interpreter and its standard library need to compute, to start
threads and to use files; every other call fails as in a kernel that does not have it. The counting filter, installed
before, reports to the scorer each call that creates a file or a thread. Landlock decides in code_limits.py which files
may be opened.
"""

import errno
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

OWN_ID = b"self"
"""Placeholder for the process id in the strict filter, which the process replaces."""

INSTRUCTION = struct.Struct("HBBI")

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_ALLOWED = """
read write futex clock_gettime gettid getpid lseek fstat newfstatat stat lstat statx close readv writev
pread64 pwrite64 preadv pwritev close_range dup dup2 dup3 pipe pipe2 flock ftruncate umask
creat mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 symlink symlinkat link linkat
getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir getdents getdents64 statfs fstatfs
munmap mprotect mremap madvise brk mincore
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack restart_syscall
pause alarm setitimer getitimer
set_robust_list get_robust_list rseq set_tid_address sched_yield sched_getaffinity getcpu exit exit_group
clock_getres clock_nanosleep nanosleep gettimeofday time times getrusage getrlimit sysinfo uname getrandom
getppid getuid geteuid getgid getegid getgroups getresuid getresgid getpgid getpgrp getsid getpriority
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd eventfd2
recvfrom getsockopt getsockname getpeername shutdown
"""

_PRETENDED = "chmod fchmod fchmodat fchmodat2 utime utimes futimesat utimensat fsync fdatasync msync"
"""Calls that set modes and times of files, as copying does, or wait for the disk: they return 0 and do nothing."""

_CREATING = "creat mkdir mkdirat symlink symlinkat link linkat"

_LOAD, _RETURN = 0x20, 0x06
_AND = 0x54
_IF_EQUAL, _IF_ANY_BIT = 0x15, 0x45
_ALLOW, _NOTIFY, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
_NUMBER, _ARCH = 0, 4
_CLONE_THREAD = 0x00010000
_O_TMPFILE = 0o20000000  # without O_DIRECTORY, which os.O_TMPFILE includes
_MAP_LOCKED, _MAP_HUGETLB = 0x2000, 0x40000
_AF_UNIX = 1
_FILE_COMMANDS = (0, 1, 2, 3, 4, 5, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_DUPFD_CLOEXEC
_LOCKING = (6, 7)  # F_SETLK and F_SETLKW, which sqlite3 needs; the kernel does not limit the memory of locks
_TERMINAL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""The requests of `ioctl` to read the state of a terminal, and FIONREAD, FIONBIO, FIONCLEX and FIOCLEX."""

_Instruction = tuple[int, int, int, int]
_DENY = [(_RETURN, 0, 0, _ERROR | errno.EPERM)]
_UNKNOWN = [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
_PASS = [(_RETURN, 0, 0, _ALLOW)]
_PRETEND = [(_RETURN, 0, 0, _ERROR)]
_REPORT = [(_RETURN, 0, 0, _NOTIFY)]


@dataclass(frozen=True)
class Filters:
    """The two filters, as sequences of `INSTRUCTION`, and the numbers of two system calls."""

    strict: bytes
    counting: bytes
    clone: int
    seccomp: int


@cache
def filters_of(machine: str) -> Filters:
    """Return the filters, with `OWN_ID` in the strict one; raise OSError for another machine."""
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"the system call filter supports x86_64 and aarch64, not {machine!r}")
    creating = [(_IF_ANY_BIT, 0, 1, os.O_CREAT | _O_TMPFILE), *_REPORT, *_PASS]
    counted = {
        **dict.fromkeys(_CREATING.split(), _REPORT),
        "open": [_argument(1), *creating],
        "openat": [_argument(2), *creating],
        "clone": [_argument(0), (_IF_ANY_BIT, 0, 1, _CLONE_THREAD), *_REPORT, *_PASS],
    }
    numbers = _numbers(machine, ("clone", "seccomp"))
    strict, counting = _program(machine, _strict_cases(), _UNKNOWN), _program(machine, counted, _PASS)
    return Filters(strict, counting, numbers["clone"], numbers["seccomp"])


def _strict_cases() -> dict[str, list[_Instruction]]:
    # Read-only files must not be truncated: the first versions of Landlock do not check that.
    without_writing = [part for mode in (os.O_RDONLY, os.O_ACCMODE) for part in _when(os.O_TRUNC | mode, _DENY)]
    truncating = [(_AND, 0, 0, os.O_TRUNC | os.O_ACCMODE), *without_writing, *_PASS]
    commands = [part for command in _FILE_COMMANDS for part in _when(command, _PASS)]
    locking = [part for command in _LOCKING for part in _when(command, _PRETEND)]
    requests = [part for request in _TERMINAL_REQUESTS for part in _when(request, _PASS)]
    (own_id,) = struct.unpack("I", OWN_ID)
    return {
        **dict.fromkeys(_ALLOWED.split(), _PASS),
        "mmap": [_argument(3), (_IF_ANY_BIT, 0, 1, _MAP_LOCKED | _MAP_HUGETLB), *_DENY, *_PASS],
        "open": [_argument(1), *truncating],
        "openat": [_argument(2), *truncating],
        "clone": [_argument(0), (_IF_ANY_BIT, 1, 0, _CLONE_THREAD), *_DENY, *_PASS],
        "fcntl": [_argument(1), *commands, *locking, *_DENY],
        "ioctl": [_argument(1), *requests, *_DENY],
        "socketpair": [_argument(0), *_when(_AF_UNIX, _PASS), *_DENY],  # for event loops
        "sendto": [*_null(4), *_PASS],  # to the other end of a pair, not to an address
        "tgkill": [_argument(0), *_when(own_id, _PASS), *_DENY],
        "prlimit64": [*_null(2), _argument(0), *_when(0, _PASS), *_when(own_id, _PASS), *_DENY],  # reading its own
        **dict.fromkeys(_PRETENDED.split(), _PRETEND),
    }


def _program(machine: str, cases: dict[str, list[_Instruction]], otherwise: list[_Instruction]) -> bytes:
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for name, number in _numbers(machine, cases).items():
        program += _when(number, cases[name])
    return b"".join(INSTRUCTION.pack(*each) for each in [*program, *otherwise])


def _numbers(machine: str, names: Iterable[str]) -> dict[str, int]:
    """Return the number of each system call that this machine has."""
    from system_calls import NotSupportedSystemCall, syscalls  # reads the kernel's tables, so imported at first use

    table, numbers = syscalls(), {}
    for name in names:
        try:
            numbers[name] = table.get(name, {"aarch64": "arm64"}.get(machine, machine))
        except NotSupportedSystemCall:  # aarch64 has no open, chmod and others
            continue
    return numbers


def _when(value: int, then: list[_Instruction]) -> list[_Instruction]:
    return [(_IF_EQUAL, 0, len(then), value), *then]


def _null(index: int) -> list[_Instruction]:
    """Deny the call unless both halves of this argument, a pointer, are 0."""
    high, low = _argument(index, high=True), _argument(index)
    return [high, (_IF_EQUAL, 1, 0, 0), *_DENY, low, (_IF_EQUAL, 1, 0, 0), *_DENY]


def _argument(index: int, *, high: bool = False) -> _Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index + (4 if high else 0))
