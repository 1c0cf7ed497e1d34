"""Fixtures of the attacks."""

import ctypes
import os
from collections.abc import Iterator

import pytest

_VERSION = 0x20080522
_OVERRIDES = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@pytest.fixture
def obeys_modes() -> Iterator[None]:
    """Make this thread obey the modes of files, also as the superuser, by giving up two capabilities meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, kept = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable
    assert libc.capget(header, kept) == 0
    reduced = (ctypes.c_uint32 * 6)(*kept)
    reduced[0] &= ~_OVERRIDES
    assert libc.capset(header, reduced) == 0
    yield
    assert libc.capset(header, kept) == 0
