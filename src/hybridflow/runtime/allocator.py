"""How much memory this process holds on to, and what its garbage collector looks through."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
_KEEP_BYTES = 2**31 - 1
_MMAP_BYTES = 2**25  # the largest that glibc takes
_SHAPES = 32
_NEW_OBJECTS = 20_000  # new containers after which the collector looks at them; 700 by default


def keep_freed_memory(large_blocks: bool = False) -> bool:
    """Keep freed memory in this process for its next allocation; returns whether the C library could be told to.

    By default glibc returns large blocks to the system at once. A training step allocates the same blocks over and
    over, and each time the system would have to find, clear and map their pages anew.

    `large_blocks`: also those above 32 MiB. For a process that puts whole batches together (268 MB in 15 ms instead of
    75); one that trains would hold some 15% more memory at its peak, in holes between blocks of changing sizes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = {_M_TRIM_THRESHOLD: _KEEP_BYTES, _M_MMAP_THRESHOLD: _MMAP_BYTES}
    if large_blocks:
        options[_M_MMAP_MAX] = 0
    return all(mallopt(option, value) for option, value in options.items())


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector while modules are imported, which takes a fifth less time.

    Imports make half a million objects that stay; the collector would look through them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def relax_garbage_collector() -> None:
    """Collect once, exempt the objects that are left from further collections, and make these rarer; once in a process.

    The modules of torch, transformers and Ray hold some 500,000 objects. Each full collection looks at all of them,
    which takes 0.1 s or more; a controller that makes thousands of handles in a step causes several.
    """
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


def bound_shape_caches() -> None:
    """Keep the code of few shapes of matrix product, unless the environment says how many; before the first product.

    oneDNN and PyTorch's layer above it make code for each shape, and keep a thousand of them by default. The number of
    tokens of a training step is new in nearly every step, so that bfloat16 training would grow by some 10 MiB a step
    up to gigabytes. Within a step all layers share their few shapes.
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(_SHAPES))
