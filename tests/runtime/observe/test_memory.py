import logging
import mmap
import sys
from types import SimpleNamespace

from hybridflow.runtime.observe import log_memory, memory_bytes


def test_memory_bytes_grow_with_the_process():
    before = memory_bytes()
    ballast = mmap.mmap(-1, 64 * 2**20, mmap.MAP_PRIVATE)  # neither freed memory that the process has kept, nor shared
    ballast[::4096] = b"x" * len(ballast[::4096])
    after = memory_bytes()
    assert after["resident"] - before["resident"] > 48 * 2**20
    assert after["peak_resident"] >= after["resident"] * 0.9


def test_memory_is_logged_at_debug_level_only(caplog):
    logger = logging.getLogger("test_memory")
    for level in (logging.INFO, logging.DEBUG):
        with caplog.at_level(level, "test_memory"):
            log_memory("before generate", logger)
    (message,) = caplog.messages
    assert message.startswith("before generate: resident ")
    assert message.endswith(" GiB")


def test_cuda_memory_is_reported_only_if_cuda_is_initialized(monkeypatch):
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        memory_allocated=lambda: 1,
        max_memory_allocated=lambda: 2,
        memory_reserved=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    sizes = {name: size for name, size in memory_bytes().items() if name.startswith("cuda")}
    assert sizes == {"cuda_allocated": 1, "cuda_peak_allocated": 2, "cuda_reserved": 3}
    cuda.is_initialized = lambda: False
    assert [name for name in memory_bytes() if name.startswith("cuda")] == []
