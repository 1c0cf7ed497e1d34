"""Restrictions on a process that runs a program written by a model; knows nothing of rewards.

The program may compute and write in one directory. Landlock decides which files may be opened, resource limits bound
time, memory and file size, all capabilities are dropped, and two seccomp filters count and deny system calls.
"""

import ctypes
import math
import os
import resource
import struct
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE, _MAKE_LINK = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_RIGHTS_BY_VERSION = (13, 14, 15, 15, 16)
"""Number of file access rights in versions 1 to 5 of Landlock; later versions add no rights for files."""

_READ = _READ_FILE | _READ_DIR
_WRITE = _WRITE_FILE | _TRUNCATE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _MAKE_LINK | _REFER
_MAX_OPEN_FILES = 64
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
_CAPABILITY_VERSION = 0x20080522
_SECCOMP_MODE_FILTER, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_NEW_LISTENER = 2, 1, 8
_INSTRUCTION_BYTES = 8
_SIGKILL = 9  # importing `signal` would take longer than all else here


class CannotRestrict(Exception):
    """A restriction that this system does not support; the message names it."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
_libc.syscall.restype = ctypes.c_long


def restrict(directory: str, cpu_s: float, memory_bytes: int, file_bytes: int) -> None:
    """Restrict files, resources and capabilities permanently, and processes that this one forks.

    Raise OSError or `CannotRestrict` if a restriction is not possible. System calls are not restricted yet.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, None, 0, 0), "PR_SET_PDEATHSIG")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, None, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _limit_files(directory)
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, math.ceil(cpu_s)),
        (resource.RLIMIT_AS, memory_bytes),
    ):
        resource.setrlimit(limit, (value, value))
    _drop_capabilities()
    try:
        os.close(os.open(os.path.join(os.path.dirname(os.__file__), "io.py"), os.O_RDONLY))
    except OSError as error:
        raise CannotRestrict(f"a Python whose standard library is readable without capabilities ({error})") from None


def count_calls(filter_program: bytes, seccomp: int) -> int:
    """Install a filter that reports system calls, also those of forked processes; return the listener's descriptor.

    `seccomp` is the number of that system call.
    """
    program, _buffer = _filter_argument(filter_program)
    arguments = (ctypes.c_uint(_SECCOMP_SET_MODE_FILTER), ctypes.c_uint(_SECCOMP_FILTER_FLAG_NEW_LISTENER), program)
    listener = _libc.syscall(ctypes.c_long(seccomp), *arguments)
    _check(listener, "seccomp notifications")
    return listener


def filter_calls(filter_program: bytes) -> None:
    """Install the filter of system calls permanently."""
    program, _buffer = _filter_argument(filter_program)
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp filters")


def _filter_argument(filter_program: bytes) -> tuple[bytes, ctypes.Array[ctypes.c_char]]:
    """Return the argument that describes the filter, and the memory to which it points."""
    buffer = ctypes.create_string_buffer(filter_program, len(filter_program))
    return struct.pack("HxxxxxxP", len(filter_program) // _INSTRUCTION_BYTES, ctypes.addressof(buffer)), buffer


def _drop_capabilities() -> None:
    """Drop all capabilities, which root has, so that this process cannot get them again."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, None, 0, 0) == 0:  # ends after the last one, or without the right
        capability += 1
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, None, 0, 0)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, bytes(24)), "dropping capabilities")
    left = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, left), "reading capabilities")
    if any(left.raw):
        raise CannotRestrict("a kernel that drops all capabilities of a process")


def _limit_files(directory: str) -> None:
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        raise CannotRestrict("Landlock (Linux 5.13 with 'landlock' among the kernel's lsm=)")
    handled = (1 << _RIGHTS_BY_VERSION[min(version, len(_RIGHTS_BY_VERSION)) - 1]) - 1
    ruleset = _libc.syscall(_CREATE_RULESET, struct.pack("Q", handled), ctypes.c_size_t(8), ctypes.c_uint(0))
    _check(ruleset, "Landlock")
    _allow(ruleset, directory, handled & (_READ | _WRITE))
    for path in _readable():
        if os.path.exists(path):
            _allow(ruleset, path, _READ if os.path.isdir(path) else _READ_FILE)
    _allow(ruleset, "/dev/null", handled & (_READ_FILE | _WRITE_FILE | _TRUNCATE))
    _check(_libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)), "Landlock")
    os.close(ruleset)


def _readable() -> list[str]:
    """Return the paths that the interpreter and the standard library read."""
    of_python = [os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib")]
    of_system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    return [*of_python, *of_system, "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero"]


def _allow(ruleset: int, path: str, rights: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, file)
        path_beneath = 1
        arguments = (ctypes.c_int(ruleset), ctypes.c_int(path_beneath), rule, ctypes.c_uint(0))
        _check(_libc.syscall(_ADD_RULE, *arguments), f"Landlock for {path}")
    finally:
        os.close(file)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise CannotRestrict(f"the kernel rejects {what}: {os.strerror(ctypes.get_errno())}")
