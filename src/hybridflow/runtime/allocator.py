"""How the C allocator treats freed memory."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEEP_BYTES = 2**31 - 1
_MMAP_BYTES = 2**25  # the largest that glibc takes


def keep_freed_memory() -> bool:
    """Keep freed memory in this process for its next allocation; returns whether the C library could be told to.

    By default glibc returns large blocks to the system at once. A training step allocates the same blocks over and
    over, and each time the system would have to find, clear and map their pages anew.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
