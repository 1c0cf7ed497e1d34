"""Ctrl-C ends a benchmark and every process that it started."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.own_run("grpo: a benchmark is interrupted")]

INTERRUPTED = 130


def start(command, **variables):
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **variables},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background inherits "ignore"
    )


def descendants(root):
    """Return the living processes below a process by id; a zombie has exited."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # exited meanwhile
            continue
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interrupt_ends_the_sides_and_their_ranks(command):
    with start(command("train_engine", "--smoke", "--repeats", "1000000")) as benchmark:
        try:
            assert any(line.startswith("threads on every side") for line in benchmark.stdout)  # all ranks are built
            started = descendants(benchmark.pid)
            assert len(started) == 4  # two sides of two ranks
            benchmark.send_signal(signal.SIGINT)
            benchmark.communicate(timeout=300)
        finally:
            benchmark.kill()
    assert benchmark.returncode == INTERRUPTED
    wait_until(lambda: not any(map(is_alive, started)))
