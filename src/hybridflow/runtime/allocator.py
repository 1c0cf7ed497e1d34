"""Settings of the C library's allocator, the garbage collector and oneDNN's caches."""

import ctypes
import gc
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
_KEEP_BYTES = 2**31 - 1
_MMAP_BYTES = 2**25  # the largest value that glibc accepts
_SHAPES = 32
_NEW_OBJECTS = 20_000  # container allocations before a collection; 700 by default


def keep_freed_memory(large_blocks: bool = False) -> bool:
    """Keep freed memory in this process for its next allocation; return whether the C library supports it.

    By default glibc returns large blocks to the system at once. A training step allocates the same blocks again and
    again, and each time the system would have to find, clear and map their pages.

    `large_blocks` includes blocks above 32 MiB. It is for a process that concatenates whole batches (268 MB in 15 ms
    instead of 75); a process that trains would use about 15% more memory at its peak because of fragmentation.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = {_M_TRIM_THRESHOLD: _KEEP_BYTES, _M_MMAP_THRESHOLD: _MMAP_BYTES}
    if large_blocks:
        options[_M_MMAP_MAX] = 0
    return all(mallopt(option, value) for option, value in options.items())


def relax_garbage_collector() -> None:
    """Collect garbage, exempt the remaining objects from collection and make collections rarer; once per process.

    The modules of torch, transformers and Ray hold about 500,000 objects. Each full collection visits all of them,
    which takes 0.1 s or more; a controller that creates thousands of handles per step causes several.
    """
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


def bound_shape_caches() -> None:
    """Limit the caches of code for matrix-product shapes; call it before the first product.

    oneDNN and PyTorch's layer above it generate code for each shape and cache a thousand shapes by default. The number
    of tokens is new in nearly every training step, so that memory would grow by about 10 MiB per step of bfloat16
    training, up to gigabytes. Within a step all layers share a few shapes. Environment variables that are already set
    take precedence.
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(_SHAPES))
