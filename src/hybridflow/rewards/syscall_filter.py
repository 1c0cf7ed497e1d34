"""Seccomp filter of the system calls that a program written by a model must not make, on x86_64 and aarch64.

The filter denies network access, processes, signals to others, executing programs, changing limits, file properties,
and everything that only an administrator needs. Landlock decides which files may be opened, in code_limits.py.
"""

import errno
import os
import struct
from collections.abc import Iterable
from functools import cache

OWN_ID = b"self"
"""Placeholder for the process id in the filter, which the process replaces."""

INSTRUCTION = struct.Struct("HBBI")

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_DENIED = """
socket connect accept sendto sendmsg bind listen accept4 sendmmsg
fork vfork execve execveat setpgid setsid
kill rt_sigqueueinfo tkill rt_tgsigqueueinfo pidfd_send_signal pidfd_open pidfd_getfd
ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp migrate_pages move_pages
setpriority sched_setparam sched_setscheduler sched_setaffinity sched_setattr ioprio_set setrlimit prctl seccomp
personality shmget shmat shmctl semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open mq_unlink
memfd_create memfd_secret io_uring_setup io_uring_enter io_uring_register
truncate chown fchown lchown fchownat mknod mknodat openat2
setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
mount umount2 pivot_root chroot acct swapon swapoff quotactl quotactl_fd unshare setns fanotify_init fanotify_mark
open_tree move_mount mount_setattr fsopen fsconfig fsmount fspick name_to_handle_at open_by_handle_at
setuid setgid setreuid setregid setgroups setresuid setresgid setfsuid setfsgid capset
syslog vhangup modify_ldt adjtimex sync syncfs settimeofday reboot sethostname setdomainname iopl ioperm
init_module finit_module delete_module clock_settime clock_adjtime kexec_load kexec_file_load
add_key request_key keyctl perf_event_open bpf userfaultfd
"""

_PRETENDED = "chmod fchmod fchmodat utime utimes futimesat utimensat"
"""Calls that set modes and times of files, as copying does: they return 0 and change nothing."""

_LAST_KNOWN = 450
"""Higher numbers are calls of newer kernels and of the x32 ABI."""

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_GREATER, _IF_ANY_BIT = 0x15, 0x25, 0x45
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH = 0, 4
_CLONE_THREAD = 0x00010000
_SETTERS_OF_SIGNAL_RECEIVERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
_IOCTLS_OF_SIGNALS = (0x8901, 0x8902, 0x5452, 0x5412, 0x541C)  # FIOSETOWN, SIOCSPGRP, FIOASYNC, TIOCSTI, TIOCLINUX
_AF_UNIX = 1

_Instruction = tuple[int, int, int, int]


@cache
def filter_program(machine: str) -> bytes:
    """Return the filter as a sequence of `INSTRUCTION`, with `OWN_ID` in it; raise OSError for another machine."""
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"the system call filter supports x86_64 and aarch64, not {machine!r}")
    deny = [(_RETURN, 0, 0, _ERROR | errno.EPERM)]
    unknown = [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    allow = [(_RETURN, 0, 0, _ALLOW)]
    pretend = [(_RETURN, 0, 0, _ERROR)]
    # Read-only files must not be truncated: the first versions of Landlock do not check that.
    without_writing = [part for mode in (os.O_RDONLY, os.O_ACCMODE) for part in _when(os.O_TRUNC | mode, deny)]
    truncating = [(_AND, 0, 0, os.O_TRUNC | os.O_ACCMODE), *without_writing, *allow]
    setters = [part for command in _SETTERS_OF_SIGNAL_RECEIVERS for part in _when(command, deny)]
    of_signals = [part for request in _IOCTLS_OF_SIGNALS for part in _when(request, deny)]
    (own_id,) = struct.unpack("I", OWN_ID)
    # A process may only read its own limits: the pointer to new ones, in two halves, must be null.
    sets_none = [_argument(2), (_IF_EQUAL, 0, 2, 0), _argument(2, high=True), (_IF_EQUAL, 1, 0, 0), *deny]
    of_itself = [_argument(0), (_IF_EQUAL, 1, 0, 0), *deny, *allow]
    cases = {
        "clone3": unknown,  # glibc falls back to clone, whose flags the filter can read
        "open": [_argument(1), *truncating],
        "openat": [_argument(2), *truncating],
        "clone": [_argument(0), (_IF_ANY_BIT, 1, 0, _CLONE_THREAD), *deny, *allow],
        "fcntl": [_argument(1), *setters, *allow],
        "ioctl": [_argument(1), *of_signals, *allow],
        "socketpair": [_argument(0), *_when(_AF_UNIX, allow), *deny],  # for event loops
        "tgkill": [_argument(0), (_IF_EQUAL, 1, 0, own_id), *deny, *allow],
        "prlimit64": [*sets_none, *of_itself],
        **dict.fromkeys(_PRETENDED.split(), pretend),
        **dict.fromkeys(_DENIED.split(), deny),
    }
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_GREATER, 0, 1, _LAST_KNOWN),
        *unknown,
    ]
    for name, number in _numbers(machine, cases).items():
        program += _when(number, cases[name])
    return b"".join(INSTRUCTION.pack(*each) for each in [*program, *allow])


def _numbers(machine: str, names: Iterable[str]) -> dict[str, int]:
    """Return the number of each system call that this machine has."""
    from system_calls import NotSupportedSystemCall, syscalls  # reads the kernel's tables, so imported at first use

    table, numbers = syscalls(), {}
    for name in names:
        try:
            numbers[name] = table.get(name, {"aarch64": "arm64"}.get(machine, machine))
        except NotSupportedSystemCall:  # aarch64 has no fork, open, chmod and others
            continue
    return numbers


def _when(value: int, then: list[_Instruction]) -> list[_Instruction]:
    return [(_IF_EQUAL, 0, len(then), value), *then]


def _argument(index: int, *, high: bool = False) -> _Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index + (4 if high else 0))
