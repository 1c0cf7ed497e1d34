"""Builds the seccomp filter of system calls that a program written by a model may not make, on x86_64 and aarch64.

The filter refuses the network, processes, signals to others, programs, limits, the properties of files, and whatever
only an administrator needs. Which files may be opened is decided by Landlock, in code_limits.py.
"""

import errno
import os
import struct
from collections.abc import Iterable
from functools import cache

OWN_ID = b"self"
"""Stands in the filter for the id of the process, which replaces it."""

INSTRUCTION = struct.Struct("HBBI")

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_REFUSED = """
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
"""Modes and times of files, which copying sets: they return 0 and change nothing."""

_LAST_KNOWN = 450
"""Above are the calls that newer kernels add, and those of the x32 ABI."""

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
    """Return the filter, an `INSTRUCTION` after another, with `OWN_ID` in it; raises OSError for another machine."""
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"there is a filter of system calls for x86_64 and aarch64, not for {machine!r}")
    refuse = [(_RETURN, 0, 0, _ERROR | errno.EPERM)]
    unknown = [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    allow = [(_RETURN, 0, 0, _ALLOW)]
    pretend = [(_RETURN, 0, 0, _ERROR)]
    # What may only be read must not be emptied: Landlock's first versions overlook it.
    without_writing = [part for mode in (os.O_RDONLY, os.O_ACCMODE) for part in _when(os.O_TRUNC | mode, refuse)]
    truncating = [(_AND, 0, 0, os.O_TRUNC | os.O_ACCMODE), *without_writing, *allow]
    setters = [part for command in _SETTERS_OF_SIGNAL_RECEIVERS for part in _when(command, refuse)]
    of_signals = [part for request in _IOCTLS_OF_SIGNALS for part in _when(request, refuse)]
    (own_id,) = struct.unpack("I", OWN_ID)
    # Limits may be read, its own only: the new ones, a pointer of two halves, must be none.
    sets_none = [_argument(2), (_IF_EQUAL, 0, 2, 0), _argument(2, high=True), (_IF_EQUAL, 1, 0, 0), *refuse]
    of_itself = [_argument(0), (_IF_EQUAL, 1, 0, 0), *refuse, *allow]
    cases = {
        "clone3": unknown,  # glibc takes clone instead, whose flags can be seen
        "open": [_argument(1), *truncating],
        "openat": [_argument(2), *truncating],
        "clone": [_argument(0), (_IF_ANY_BIT, 1, 0, _CLONE_THREAD), *refuse, *allow],
        "fcntl": [_argument(1), *setters, *allow],
        "ioctl": [_argument(1), *of_signals, *allow],
        "socketpair": [_argument(0), *_when(_AF_UNIX, allow), *refuse],  # for event loops
        "tgkill": [_argument(0), (_IF_EQUAL, 1, 0, own_id), *refuse, *allow],
        "prlimit64": [*sets_none, *of_itself],
        **dict.fromkeys(_PRETENDED.split(), pretend),
        **dict.fromkeys(_REFUSED.split(), refuse),
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
    from system_calls import NotSupportedSystemCall, syscalls  # the kernel's tables, read at first use

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
