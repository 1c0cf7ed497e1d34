"""The system calls that a program written by a model may not make, as a seccomp filter of this process.

Refused are the network, processes, signals to others, programs, limits, the properties of files, and whatever only an
administrator needs. Which files may be opened is Landlock's to say, in code_limits.py. Linux on x86_64 and aarch64.
"""

import errno
import os
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Each name's number on x86_64; from 424 on they are the same everywhere.
_REFUSED_X86_64 = {
    "socket": 41, "connect": 42, "accept": 43, "sendto": 44, "sendmsg": 46, "bind": 49, "listen": 50,
    "accept4": 288, "sendmmsg": 307,
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "setpgid": 109, "setsid": 112,
    "kill": 62, "rt_sigqueueinfo": 129, "tkill": 200, "rt_tgsigqueueinfo": 297,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "migrate_pages": 256,
    "move_pages": 279, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203,
    "sched_setattr": 314, "ioprio_set": 251, "setrlimit": 160, "prctl": 157, "seccomp": 317, "personality": 135,
    "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69,
    "msgrcv": 70, "msgctl": 71, "semtimedop": 220, "mq_open": 240, "mq_unlink": 241, "memfd_create": 319,
    "truncate": 76, "chown": 92, "fchown": 93, "lchown": 94, "mknod": 133,
    "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
    "mknodat": 259, "fchownat": 260,
    "pivot_root": 155, "chroot": 161, "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
    "quotactl": 179, "unshare": 272, "fanotify_init": 300, "fanotify_mark": 301, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "setns": 308,
    "setuid": 105, "setgid": 106, "setreuid": 113, "setregid": 114, "setgroups": 116, "setresuid": 117,
    "setresgid": 119, "setfsuid": 122, "setfsgid": 123, "capset": 126,
    "syslog": 103, "vhangup": 153, "modify_ldt": 154, "adjtimex": 159, "sync": 162, "settimeofday": 164, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176,
    "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298,
    "clock_adjtime": 305, "syncfs": 306, "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_REFUSED_AARCH64 = {
    "socket": 198, "bind": 200, "listen": 201, "accept": 202, "connect": 203, "sendto": 206,
    "sendmsg": 211, "accept4": 242, "sendmmsg": 269,
    "execve": 221, "execveat": 281, "setpgid": 154, "setsid": 157,
    "kill": 129, "tkill": 130, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "migrate_pages": 238,
    "move_pages": 239, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "setpriority": 140,
    "sched_setattr": 274, "ioprio_set": 30, "setrlimit": 164, "prctl": 167, "seccomp": 277, "personality": 92,
    "mq_open": 180, "mq_unlink": 181, "msgget": 186, "msgctl": 187, "msgrcv": 188, "msgsnd": 189, "semget": 190,
    "semctl": 191, "semtimedop": 192, "semop": 193, "shmget": 194, "shmctl": 195, "shmat": 196, "memfd_create": 279,
    "truncate": 45, "fchownat": 54, "fchown": 55, "mknodat": 33,
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "unshare": 97,
    "swapon": 224, "swapoff": 225, "fanotify_init": 262, "fanotify_mark": 263, "name_to_handle_at": 264,
    "open_by_handle_at": 265, "setns": 268,
    "capset": 91, "setregid": 143, "setgid": 144, "setreuid": 145, "setuid": 146, "setresuid": 147, "setresgid": 149,
    "setfsuid": 151, "setfsgid": 152, "setgroups": 159,
    "vhangup": 58, "sync": 81, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112,
    "syslog": 116, "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171,
    "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "clock_adjtime": 266, "syncfs": 267,
    "finit_module": 273, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip
_REFUSED_EVERYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434,
    "openat2": 437, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
    "memfd_secret": 447, "process_mrelease": 448,
}  # fmt: skip
# Modes and times of files, which copying sets: said to be done, and not done.
_PRETENDED = {
    "x86_64": {
        "chmod": 90,
        "fchmod": 91,
        "fchmodat": 268,
        "utime": 132,
        "utimes": 235,
        "futimesat": 261,
        "utimensat": 280,
    },
    "aarch64": {"fchmod": 52, "fchmodat": 53, "utimensat": 88},
}  # fmt: skip
_CLONE3 = 435
_LAST_KNOWN = 450
"""What a newer kernel adds, and what x32 calls, is above."""

# Those of which it depends on the arguments.
_CHECKED = {
    "x86_64": {
        "open": 2,
        "openat": 257,
        "clone": 56,
        "fcntl": 72,
        "tgkill": 234,
        "prlimit64": 302,
        "ioctl": 16,
        "socketpair": 53,
    },
    "aarch64": {
        "openat": 56,
        "clone": 220,
        "fcntl": 25,
        "tgkill": 131,
        "prlimit64": 261,
        "ioctl": 29,
        "socketpair": 199,
    },
}

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_GREATER, _IF_ANY_BIT = 0x15, 0x25, 0x45
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH = 0, 4
_CLONE_THREAD = 0x00010000
_SETTERS_OF_SIGNAL_RECEIVERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
_IOCTLS_OF_SIGNALS = (0x8901, 0x8902, 0x5452, 0x5412, 0x541C)  # FIOSETOWN, SIOCSPGRP, FIOASYNC, TIOCSTI, TIOCLINUX
_AF_UNIX = 1

_Instruction = tuple[int, int, int, int]
_INSTRUCTION = struct.Struct("HBBI")
INSTRUCTION_BYTES = _INSTRUCTION.size


def filter_program(machine: str, process_id: int) -> bytes:
    """The filter for the process of this id, instructions of `INSTRUCTION_BYTES` each; OSError for other machines."""
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"there is a filter of system calls for x86_64 and aarch64, not for {machine!r}")
    refused = {**(_REFUSED_X86_64 if machine == "x86_64" else _REFUSED_AARCH64), **_REFUSED_EVERYWHERE}
    checked = _CHECKED[machine]
    refuse = [(_RETURN, 0, 0, _ERROR | errno.EPERM)]
    unknown = [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    allow = [(_RETURN, 0, 0, _ALLOW)]
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_GREATER, 0, 1, _LAST_KNOWN),
        *unknown,
        *_when(_CLONE3, unknown),  # glibc takes clone instead, whose flags can be seen
    ]
    # What may only be read must not be emptied: Landlock's first versions overlook it.
    without_writing = [part for mode in (os.O_RDONLY, os.O_ACCMODE) for part in _when(os.O_TRUNC | mode, refuse)]
    truncating = [(_AND, 0, 0, os.O_TRUNC | os.O_ACCMODE), *without_writing, *allow]
    if "open" in checked:
        program += _when(checked["open"], [_argument(1), *truncating])
    program += _when(checked["openat"], [_argument(2), *truncating])
    program += _when(checked["clone"], [_argument(0), (_IF_ANY_BIT, 1, 0, _CLONE_THREAD), *refuse, *allow])
    setters = [part for command in _SETTERS_OF_SIGNAL_RECEIVERS for part in _when(command, refuse)]
    program += _when(checked["fcntl"], [_argument(1), *setters, *allow])
    of_signals = [part for request in _IOCTLS_OF_SIGNALS for part in _when(request, refuse)]
    program += _when(checked["ioctl"], [_argument(1), *of_signals, *allow])
    program += _when(checked["socketpair"], [_argument(0), *_when(_AF_UNIX, allow), *refuse])  # for event loops
    program += _when(checked["tgkill"], [_argument(0), (_IF_EQUAL, 1, 0, process_id), *refuse, *allow])
    # Limits may be read, its own only: the new ones, a pointer of two halves, must be none.
    sets_none = [_argument(2), (_IF_EQUAL, 0, 2, 0), _argument(2, high=True), (_IF_EQUAL, 1, 0, 0), *refuse]
    of_itself = [_argument(0), (_IF_EQUAL, 1, 0, 0), *refuse, *allow]
    program += _when(checked["prlimit64"], [*sets_none, *of_itself])
    for number in _PRETENDED[machine].values():
        program += _when(number, [(_RETURN, 0, 0, _ERROR)])
    for number in refused.values():
        program += _when(number, refuse)
    return b"".join(_INSTRUCTION.pack(*each) for each in [*program, *allow])


def _when(value: int, then: list[_Instruction]) -> list[_Instruction]:
    return [(_IF_EQUAL, 0, len(then), value), *then]


def _argument(index: int, *, high: bool = False) -> _Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index + (4 if high else 0))
