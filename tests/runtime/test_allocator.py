import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, torch
from hybridflow.runtime import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    raise SystemExit("no mallopt")
class Mallinfo2(ctypes.Structure):  # of glibc's malloc.h
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
blocks = [torch.ones(3_000_000) for _ in range(8)]  # 12 MB each
blocks.clear()
print(mallinfo2().fordblks)
"""


def free_bytes_held(mode: str) -> int:
    """What the C library holds for its next allocation after 96 MB were freed."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=False)
    if "no mallopt" in done.stderr or "mallinfo2" in done.stderr:
        pytest.skip("not glibc 2.33 or newer")
    return int(done.stdout)


def test_memory_that_was_freed_stays_in_the_process():
    assert free_bytes_held("returned") < 90e6 < free_bytes_held("kept")
