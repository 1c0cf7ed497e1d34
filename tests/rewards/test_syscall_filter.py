"""The seccomp filters, run by an interpreter of their few instructions.

Numbers are those of the kernel's tables: arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h.
"""

import errno
import os
import struct

import pytest

from hybridflow.rewards.syscall_filter import INSTRUCTION, OWN_ID, filters_of

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
    ("openat2", 437, 437, (), UNKNOWN),
    ("socket", 41, 198, (1,), UNKNOWN),
    ("socketpair of this machine", 53, 199, (1,), ALLOW),
    ("socketpair of a network", 53, 199, (2,), DENY),
    ("sendto to the other end", 44, 206, (3, 0, 1, 0, 0), ALLOW),
    ("sendto to an address", 44, 206, (3, 0, 1, 0, 2**40), DENY),
    ("sendmsg", 46, 211, (), UNKNOWN),
    ("fork", 57, None, (), UNKNOWN),
    ("clone of a process", 56, 220, (17,), DENY),
    ("clone of a thread", 56, 220, (0x3D0F00,), ALLOW),
    ("clone3", 435, 435, (), UNKNOWN),
    ("execve", 59, 221, (), UNKNOWN),
    ("kill", 62, 129, (), UNKNOWN),
    ("tgkill of itself", 234, 131, (OWN,), ALLOW),
    ("tgkill of another", 234, 131, (1,), DENY),
    ("ptrace", 101, 117, (), UNKNOWN),
    ("mount", 165, 40, (), UNKNOWN),
    ("prctl", 157, 167, (), UNKNOWN),
    ("capset", 126, 91, (), UNKNOWN),
    ("fallocate", 285, 47, (), UNKNOWN),
    ("splice", 275, 76, (), UNKNOWN),
    ("mlock", 149, 228, (), UNKNOWN),
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
    ("io_uring_setup", 425, 425, (), UNKNOWN),
    ("memfd_create", 319, 279, (), UNKNOWN),
    ("bpf", 321, 280, (), UNKNOWN),
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
