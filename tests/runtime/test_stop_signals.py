import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridflow.runtime.stop_signals import StopRequest, signals_after

OWN_RUN = pytest.mark.own_run("resumed: sends signals at chosen moments")
# A training loop that prints when it is ready and how it ended.
LOOP = """
import hashlib, signal, sys, time
from hybridflow.runtime.stop_signals import StopRequest, signals_after

signal.signal(signal.SIGINT, signal.default_int_handler)
with StopRequest() as stop:
    print("ready", flush=True)
    if "kernel" in sys.argv:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # runs for minutes without the interpreter lock
    while not stop.requested:
        time.sleep(0.01)
    print("stopping after", stop.signal_name, flush=True)
    if "linger" in sys.argv:
        time.sleep(1000)
print("left cleanly", flush=True)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOOP, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def is_pending(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    pending = int(next(line for line in status.splitlines() if line.startswith("ShdPnd")).split()[1], 16)
    return bool(pending >> (number - 1) & 1)


@pytest.mark.runs
@OWN_RUN
def test_first_signal_lets_the_loop_finish_and_the_second_ends_it():
    process = start()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "stopping after SIGINT\nleft cleanly\n")
    assert "SIGINT: this step will be finished" in errors
    process = start("linger")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping after SIGINT\n"
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=120)[0], process.returncode) == ("", 130)


@pytest.mark.runs
@OWN_RUN
def test_second_signal_ends_a_process_inside_a_long_kernel():
    process = start("kernel")
    process.send_signal(signal.SIGTERM)
    while is_pending(process.pid, signal.SIGTERM):
        time.sleep(0.01)  # two pending signals would arrive as one
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (130, "")
    assert errors.endswith("interrupted\n")


FORKS = """
import os, signal, time
from hybridflow.runtime.stop_signals import StopRequest, signals_after

read_end, write_end = os.pipe()
with StopRequest() as stop:
    children = []
    for _ in range(3):
        if not (pid := os.fork()):
            os.write(write_end, b"1")  # Python drops signals that arrive during a fork
            while not stop.requested:
                time.sleep(0.01)
            os._exit(7)
        os.read(read_end, 1)
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    print(statuses, stop.requested)
"""


@pytest.mark.runs
@OWN_RUN
def test_signal_to_a_forked_child_does_not_reach_the_parent():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[7, 7, 7] False\n")


@pytest.fixture
def own_handler():
    """Install a handler of SIGTERM; return the signals that it gets."""
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, previous)


def test_a_request_takes_the_place_of_handlers_and_restores_them(own_handler, caplog):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with caplog.at_level(logging.WARNING), StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert (stop.requested, stop.signal_name, own_handler) == (True, "SIGTERM", [])
    assert "a checkpoint is saved and the run ends. A second signal ends it at once" in caplog.text
    with pytest.raises(ZeroDivisionError), StopRequest():
        _ = 1 / 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


@pytest.mark.usefixtures("own_handler")
def test_ignored_signals_and_other_threads_are_left_alone():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.requested
    inside = []

    def work() -> None:
        with StopRequest() as stop:
            inside.append((signal.getsignal(signal.SIGTERM), stop.requested))

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (before, inside) == (signal.SIG_IGN, [(signal.SIG_DFL, False)])


def test_a_signal_in_a_block_that_must_end_is_handled_after_it(own_handler, caplog):
    with caplog.at_level(logging.WARNING), signals_after("the start"):
        signal.raise_signal(signal.SIGTERM)
        assert own_handler == []
    assert len(own_handler) == 1
    assert "SIGTERM: the run ends after the start. A second signal ends it at once." in caplog.text
    with signals_after("the start"):
        pass
    assert len(own_handler) == 1
