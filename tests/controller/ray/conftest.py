"""Helpers of the tests on a cluster: waiting, and processes in /proc."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest


def is_gone(pid: int) -> bool:
    """Return whether a process has exited, also if no parent has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """Return `wait_until(condition)`, which fails if the condition is not true within 100 seconds."""

    def wait(condition: Callable[[], object], timeout_s: float = 100.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.05)

    return wait


@pytest.fixture(scope="session")
def wait_until_gone(wait_until: Callable[..., None]) -> Callable[[Iterable[int]], None]:
    """Return `wait_until_gone(pids)`, which waits until these processes have exited."""
    return lambda pids: wait_until(lambda: all(map(is_gone, pids)))
