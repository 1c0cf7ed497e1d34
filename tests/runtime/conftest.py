import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hybridflow.runtime.process_address import ProcessAddress

HEADER = """
import ctypes, os, pickle, re, signal, sys, threading, time
from hybridflow.runtime.process_address import allow_observers, own_address

allow_observers()
print(pickle.dumps(own_address()).hex(), flush=True)

"""


@dataclass
class Observed:
    """A process under observation by a test."""

    process: subprocess.Popen
    address: ProcessAddress

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def write_line(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait_for_state(self, letter: str) -> None:
        deadline = time.monotonic() + 100
        while self.state() != letter:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def state(self) -> str:
        """Return the state letter in /proc/<pid>/stat."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def wait_until_it_sleeps(self) -> None:
        assert self.read_line() == "ready"
        self.wait_for_state("S")


@pytest.fixture
def observe(tmp_path) -> Iterator[Callable[..., Observed]]:
    """Return a function that starts a program; its first line is line 8 of a file `observed_N.py`."""
    started: list[subprocess.Popen] = []

    def start(program: str, *arguments: str) -> Observed:
        script = tmp_path / f"observed_{len(started)}.py"
        script.write_text(HEADER + textwrap.dedent(program))
        with open(script.with_suffix(".log"), "w") as log:
            command = [sys.executable, str(script), *arguments]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=tmp_path))
        assert started[-1].stdout is not None
        return Observed(started[-1], pickle.loads(bytes.fromhex(started[-1].stdout.readline())))

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def waits_for_a_lock() -> str:
    """Return a program whose line 13 never returns."""
    return """
def wait_for_the_lock():
    lock = threading.Lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()

wait_for_the_lock()
"""


@pytest.fixture
def waits_with_the_interpreter_lock() -> str:
    """Return a program whose C code holds the interpreter lock until it reads a line."""
    return """
def read_with_the_lock():
    print("ready", flush=True)
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)

read_with_the_lock()
print("done", flush=True)
"""
