import logging
import mmap
import subprocess
import sys
from types import SimpleNamespace

from hybridflow.observability import log_memory, memory_bytes


def test_memory_bytes_grow_with_the_process():
    before = memory_bytes()
    ballast = mmap.mmap(-1, 64 * 2**20)  # not from freed memory that the process has kept
    ballast[::4096] = b"x" * len(ballast[::4096])
    after = memory_bytes()
    assert after["resident"] - before["resident"] > 48 * 2**20
    assert after["peak_resident"] >= after["resident"] * 0.9


def test_memory_is_logged_at_debug_level_only(caplog):
    logger = logging.getLogger("test_memory")
    with caplog.at_level(logging.INFO, "test_memory"):
        log_memory("before generate", logger)
    assert caplog.messages == []
    with caplog.at_level(logging.DEBUG, "test_memory"):
        log_memory("before generate", logger)
    (message,) = caplog.messages
    assert message.startswith("before generate: resident ")
    assert message.endswith(" GiB")


def test_memory_bytes_does_not_import_torch():
    program = (
        "import sys\nfrom hybridflow.observability.memory import memory_bytes\n"
        "assert 'cuda_allocated' not in memory_bytes()\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_cuda_memory_is_reported_only_if_cuda_is_initialized(monkeypatch):
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        memory_allocated=lambda: 1,
        max_memory_allocated=lambda: 2,
        memory_reserved=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    sizes = memory_bytes()
    assert {name: size for name, size in sizes.items() if name.startswith("cuda")} == {
        "cuda_allocated": 1,
        "cuda_peak_allocated": 2,
        "cuda_reserved": 3,
    }
    cuda.is_initialized = lambda: False
    assert [name for name in memory_bytes() if name.startswith("cuda")] == []
