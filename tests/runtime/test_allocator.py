import os
import subprocess
import sys

import pytest

from hybridflow.runtime import bound_shape_caches

PROGRAM = """
import ctypes, sys, torch
from hybridflow.runtime import keep_freed_memory
if sys.argv[1] != "returned" and not keep_freed_memory(large_blocks=sys.argv[1] == "large"):
    raise SystemExit("no mallopt")
class Mallinfo2(ctypes.Structure):  # of glibc's malloc.h
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
blocks = [torch.ones(int(sys.argv[2]) // 4) for _ in range(8)]
blocks.clear()
print(mallinfo2().fordblks)
"""


def free_bytes_held(mode: str, size: int = 12_000_000) -> int:
    """Return the bytes that the C library keeps after 8 blocks of `size` bytes were freed."""
    command = [sys.executable, "-c", PROGRAM, mode, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no mallopt" in done.stderr or "mallinfo2" in done.stderr:
        pytest.skip("not glibc 2.33 or newer")
    return int(done.stdout)


def test_freed_memory_stays_in_the_process():
    assert free_bytes_held("returned") < 90e6 < free_bytes_held("kept")


def test_large_blocks_stay_only_if_requested():
    assert free_bytes_held("kept", 40_000_000) < 300e6 < free_bytes_held("large", 40_000_000)


SHAPES = """
import ctypes, os, sys, torch
from hybridflow.runtime import bound_shape_caches
for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.pop(name, None)
if sys.argv[1] == "bounded":
    bound_shape_caches()
class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
weight = torch.ones(32, 32, dtype=torch.bfloat16)
for rows in range(1, 301):
    if rows == 101:
        before = mallinfo2().h
    torch.nn.functional.linear(torch.ones(rows, 32, dtype=torch.bfloat16), weight)
print(mallinfo2().h - before)
"""


def growth(mode: str) -> int:
    """Return the bytes in use that 200 products of different shapes add."""
    done = subprocess.run([sys.executable, "-c", SHAPES, mode], capture_output=True, text=True, check=False)
    if "mallinfo2" in done.stderr:
        pytest.skip("not glibc 2.33 or newer")
    return int(done.stdout)


def test_products_of_new_shapes_do_not_grow_the_process():
    unbounded = growth("unbounded")
    if unbounded < 5e6:
        pytest.skip("this PyTorch does not cache code per shape")
    assert growth("bounded") < 0.1 * unbounded


def test_environment_variables_take_precedence(monkeypatch):
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    bound_shape_caches()
    assert (os.environ["LRU_CACHE_CAPACITY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("7", "32")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def test_loaded_objects_are_exempt_from_collection_once():
    program = (
        "import gc; from hybridflow.runtime import relax_garbage_collector as e; e(); first = gc.get_freeze_count(); "
        "kept = [[] for _ in range(1000)]; e(); print(first > 10_000, gc.get_freeze_count() <= first)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "True True\n"
