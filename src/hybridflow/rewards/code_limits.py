"""Restrictions on a process that runs a program written by a model; knows nothing of rewards.

The program may compute and write in one directory. Resource limits bound time, memory and file size, Landlock decides
which files may be opened, and a seccomp filter denies other system calls.
"""

import ctypes
import math
import os
import resource
import signal
import struct
import sys
from contextlib import suppress

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
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8


class CannotRestrict(Exception):
    """A restriction that this system does not support; the message names it."""


def restrict(directory: str, cpu_s: float, memory_bytes: int, file_bytes: int, filter_program: bytes) -> None:
    """Restrict this process permanently; raise OSError or `CannotRestrict` if a restriction is not possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, None, 0, 0), "PR_SET_PDEATHSIG")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, None, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _limit_files(libc, directory)
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, math.ceil(cpu_s)),
        (resource.RLIMIT_AS, memory_bytes),
    ):
        resource.setrlimit(limit, (value, value))
    buffer = ctypes.create_string_buffer(filter_program)
    program = struct.pack("HxxxxxxP", len(filter_program) // _INSTRUCTION_BYTES, ctypes.addressof(buffer))
    _check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp filters")


def _limit_files(libc: ctypes.CDLL, directory: str) -> None:
    libc.syscall.restype = ctypes.c_long
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        raise CannotRestrict("Landlock (Linux 5.13 with 'landlock' among the kernel's lsm=)")
    handled = (1 << _RIGHTS_BY_VERSION[min(version, len(_RIGHTS_BY_VERSION)) - 1]) - 1
    ruleset = libc.syscall(_CREATE_RULESET, struct.pack("Q", handled), ctypes.c_size_t(8), ctypes.c_uint(0))
    _check(ruleset, "Landlock")
    _allow(libc, ruleset, directory, handled & (_READ | _WRITE))
    for path in _readable():
        with suppress(FileNotFoundError):
            _allow(libc, ruleset, path, _READ if os.path.isdir(path) else _READ_FILE)
    _allow(libc, ruleset, "/dev/null", handled & (_READ_FILE | _WRITE_FILE | _TRUNCATE))
    _check(libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)), "Landlock")
    os.close(ruleset)


def _readable() -> list[str]:
    """Return the paths that the interpreter and the standard library read."""
    of_python = [os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib")]
    of_system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    return [*of_python, *of_system, "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero"]


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, file)
        path_beneath = 1
        arguments = (ctypes.c_int(ruleset), ctypes.c_int(path_beneath), rule, ctypes.c_uint(0))
        _check(libc.syscall(_ADD_RULE, *arguments), f"Landlock for {path}")
    finally:
        os.close(file)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise CannotRestrict(f"the kernel rejects {what}: {os.strerror(ctypes.get_errno())}")
