"""Settings of the C library's allocator, of shape caches and of the garbage collector, in processes of their own."""

import os
import subprocess
import sys

import pytest

from hybridflow.runtime.allocator import bound_shape_caches

IN_USE_AND_FREE = """
import ctypes, os, sys, torch
from hybridflow.runtime.allocator import bound_shape_caches, keep_freed_memory
class Mallinfo2(ctypes.Structure):  # of glibc's malloc.h
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
"""
FREED = """
if sys.argv[1] != "returned" and not keep_freed_memory(large_blocks=sys.argv[1] == "large"):
    raise SystemExit("no mallopt")
blocks = [torch.ones(int(sys.argv[2]) // 4) for _ in range(8)]
blocks.clear()
print(mallinfo2().fordblks)
"""
SHAPES = """
for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.pop(name, None)
if sys.argv[1] == "bounded":
    bound_shape_caches()
weight = torch.ones(32, 32, dtype=torch.bfloat16)
for rows in range(1, 301):
    if rows == 101:
        before = mallinfo2().uordblks
    torch.nn.functional.linear(torch.ones(rows, 32, dtype=torch.bfloat16), weight)
print(mallinfo2().uordblks - before)
"""
OWN_RUN = pytest.mark.own_run("grpo: measures the memory of a process")


def bytes_of(program: str, *arguments: str) -> int:
    """Return the bytes that a program prints."""
    command = [sys.executable, "-c", IN_USE_AND_FREE + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no mallopt" in done.stderr or "mallinfo2" in done.stderr:
        pytest.skip("not glibc 2.33 or newer")
    return int(done.stdout)


@pytest.mark.exhaustive
@OWN_RUN
def test_freed_memory_stays_and_large_blocks_only_if_requested():
    small, large = "12000000", "40000000"
    assert bytes_of(FREED, "returned", small) < 90e6 < bytes_of(FREED, "kept", small)
    assert bytes_of(FREED, "kept", large) < 300e6 < bytes_of(FREED, "large", large)


@pytest.mark.exhaustive
@OWN_RUN
def test_products_of_new_shapes_do_not_grow_the_process():
    unbounded = bytes_of(SHAPES, "unbounded")
    if unbounded < 5e6:
        pytest.skip("this PyTorch does not cache code per shape")
    assert bytes_of(SHAPES, "bounded") < 0.1 * unbounded


def test_environment_variables_take_precedence(monkeypatch):
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    bound_shape_caches()
    assert (os.environ["LRU_CACHE_CAPACITY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("7", "32")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")


@pytest.mark.runs
@OWN_RUN
def test_loaded_objects_are_exempt_from_collection_once():
    program = (
        "import gc, torch; from hybridflow.runtime.allocator import relax_garbage_collector as e; e(); "
        "first = gc.get_freeze_count(); "
        "kept = [[] for _ in range(1000)]; e(); print(first > 10_000, gc.get_freeze_count() <= first)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "True True\n"
