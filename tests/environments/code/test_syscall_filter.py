"""The seccomp filters, run by an interpreter of their few instructions.

Numbers are those of the kernel's tables: arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h.
"""

import errno
import os
import struct
from contextlib import suppress

import pytest
from system_calls import NotSupportedSystemCall, syscalls

from hybridflow.environments.code.syscall_filter import INSTRUCTION, OWN_ID, filters_of

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, NOTIFY, KILL, PRETEND = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
DENY, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
CREATE = os.O_WRONLY | os.O_CREAT
OWN = struct.unpack("I", OWN_ID)[0]


def action(program: bytes, machine: str, number: int, *arguments: int) -> int:
    """Return what the filter decides for a system call."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("IIQ6Q", number, ARCHITECTURES.get(machine, 0), 0, *padded)
    instructions, at, value = list(INSTRUCTION.iter_unpack(program)), 0, 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("I", data, operand)
            case 0x54:
                value &= operand
            case 0x15:
                at += if_true if value == operand else if_false
            case 0x45:
                at += if_true if value & operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"instruction {code:#x}")


STRICT = [
    # name, number on x86_64 and aarch64 (None: it does not have the call), arguments, action
    ("read", 0, 63, (), ALLOW),
    ("futex", 202, 98, (), ALLOW),
    ("openat to read", 257, 56, (0, 0, os.O_RDONLY), ALLOW),
    ("openat to write", 257, 56, (0, 0, CREATE | os.O_TRUNC), ALLOW),
    ("openat to truncate what is only read", 257, 56, (0, 0, os.O_RDONLY | os.O_TRUNC), DENY),
    ("open to truncate what is only read", 2, None, (0, os.O_RDONLY | os.O_TRUNC), DENY),
    ("socketpair of this machine", 53, 199, (1,), ALLOW),
    ("socketpair of a network", 53, 199, (2,), DENY),
    ("sendto to the other end", 44, 206, (3, 0, 1, 0, 0), ALLOW),
    ("sendto to an address", 44, 206, (3, 0, 1, 0, 2**40), DENY),
    ("clone of a process", 56, 220, (17,), DENY),
    ("clone of a thread", 56, 220, (0x3D0F00,), ALLOW),
    ("tgkill of itself", 234, 131, (OWN,), ALLOW),
    ("tgkill of another", 234, 131, (1,), DENY),
    ("mmap", 9, 222, (0, 4096, 3, 0x22), ALLOW),
    ("mmap of huge pages", 9, 222, (0, 4096, 3, 0x40022), DENY),
    ("prlimit64 to read", 302, 261, (0, 7, 0), ALLOW),
    ("prlimit64 to set", 302, 261, (0, 7, 2**40), DENY),
    ("prlimit64 of another", 302, 261, (1, 7, 0), DENY),
    ("fcntl F_SETFL", 72, 25, (3, 4), ALLOW),
    ("fcntl F_SETLK", 72, 25, (3, 6), PRETEND),
    ("fcntl F_SETOWN", 72, 25, (3, 8), DENY),
    ("fcntl F_SETLEASE", 72, 25, (3, 1024), DENY),
    ("fcntl F_SETPIPE_SZ", 72, 25, (3, 1031), DENY),
    ("fcntl F_ADD_SEALS", 72, 25, (3, 1033), DENY),
    ("ioctl TCGETS", 16, 29, (3, 0x5401), ALLOW),
    ("ioctl TIOCSTI", 16, 29, (3, 0x5412), DENY),
    ("ioctl FS_IOC_SETFLAGS", 16, 29, (3, 0x40086602), DENY),
    ("ioctl FIFREEZE", 16, 29, (3, 0xC0045877), DENY),
    ("chmod", 90, None, (), PRETEND),
    ("fchmodat", 268, 53, (), PRETEND),
    ("a call of the x32 ABI", 0x40000000, 0x40000000, (), UNKNOWN),
    ("a call of the future", 600, 600, (), UNKNOWN),
]

COUNTING = [
    ("openat to create", 257, 56, (0, 0, CREATE), NOTIFY),
    ("openat of a file without a name", 257, 56, (0, 0, 0o20000000 | os.O_WRONLY), NOTIFY),
    ("openat to write", 257, 56, (0, 0, os.O_WRONLY), ALLOW),
    ("open to create", 2, None, (0, CREATE), NOTIFY),
    ("creat", 85, None, (), NOTIFY),
    ("mkdirat", 258, 34, (), NOTIFY),
    ("symlinkat", 266, 36, (), NOTIFY),
    ("linkat", 265, 37, (), NOTIFY),
    ("clone of a thread", 56, 220, (0x3D0F00,), NOTIFY),
    ("clone of a process", 56, 220, (17,), ALLOW),
    ("sendmsg", 46, 211, (), ALLOW),
]


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filters_decide_each_call(machine):
    filters = filters_of(machine)
    decided, wanted = {}, {}
    for program, table in ((filters.strict, STRICT), (filters.counting, COUNTING)):
        for name, on_x86, on_arm, arguments, result in table:
            number = on_x86 if machine == "x86_64" else on_arm
            if number is not None:
                key = (program is filters.strict, name)
                decided[key], wanted[key] = action(program, machine, number, *arguments), result
    assert decided == wanted


NEVER = """
open_by_handle_at openat2 inotify_init1 fanotify_init fallocate splice vmsplice sendfile memfd_create mlock mlockall
socket connect bind listen accept4 sendmsg sendmmsg recvmsg fork vfork clone3 execve execveat kill tkill rt_sigqueueinfo
pidfd_open pidfd_send_signal pidfd_getfd ptrace process_vm_readv process_vm_writev kcmp setrlimit setpriority
sched_setaffinity sched_setscheduler setsid setpgid prctl msgget semget shmget mq_open truncate mknodat chown fchownat
setxattr chroot pivot_root mount fsopen open_tree move_mount umount2 unshare setns clock_settime settimeofday
sethostname reboot init_module finit_module kexec_load syslog setuid setgid setgroups capset seccomp
landlock_create_ruleset io_uring_setup add_key keyctl bpf userfaultfd perf_event_open
"""
"""Calls by which a program could reach others or the kernel."""


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_no_program_reaches_others_or_the_kernel(machine):
    table, strict, decided = syscalls(), filters_of(machine).strict, {}
    for name in NEVER.split():
        with suppress(NotSupportedSystemCall):  # aarch64 has no fork and others
            number = table.get(name, {"aarch64": "arm64"}.get(machine, machine))
            decided[name] = action(strict, machine, number)
    assert len(decided) > 70
    assert decided == dict.fromkeys(decided, UNKNOWN)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filters_fit_into_the_kernel_and_reject_other_machines(machine):
    filters = filters_of(machine)
    for program in (filters.strict, filters.counting):
        assert len(program) // INSTRUCTION.size < 4096  # the kernel's limit
        assert action(program, "riscv64", 0) == KILL
    assert filters.strict.count(OWN_ID) == 2
    assert (filters.clone, filters.seccomp) == ((56, 317) if machine == "x86_64" else (220, 277))
    with pytest.raises(OSError, match="supports x86_64 and aarch64, not 'riscv64'"):
        filters_of("riscv64")
