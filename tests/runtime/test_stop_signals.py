import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridflow.runtime import StopRequest

# A training loop that prints when it is ready and how it ended.
LOOP = """
import hashlib, signal, sys, time
from hybridflow.runtime import StopRequest

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
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def is_pending(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    pending = int(next(line for line in status.splitlines() if line.startswith("ShdPnd")).split()[1], 16)
    return bool(pending >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_lets_the_loop_finish(number):
    process = start()
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert output == f"stopping after {number.name}\nleft cleanly\n"
    assert process.returncode == 0
    assert f"{number.name}: this step will be finished" in errors


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)],
)
def test_second_signal_ends_the_process_at_once(first, second):
    process = start("linger")
    process.send_signal(first)
    assert process.stdout is not None
    assert process.stdout.readline() == f"stopping after {first.name}\n"
    process.send_signal(second)
    output, _ = process.communicate(timeout=120)
    assert output == ""
    assert process.returncode == 130


def test_second_signal_ends_a_process_inside_a_long_kernel():
    process = start("kernel")
    process.send_signal(signal.SIGTERM)
    while is_pending(process.pid, signal.SIGTERM):
        time.sleep(0.01)  # two pending signals would arrive as one
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert output == ""
    assert errors.endswith("interrupted\n")


FORKS = """
import os, signal, time
from hybridflow.runtime import StopRequest

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


def test_signal_to_a_forked_child_does_not_reach_the_parent():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[7, 7, 7] False\n"
    assert done.returncode == 0


def test_previous_handlers_are_restored():
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda *_: seen.append("own handler"))
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested
            assert seen == []
        assert signal.getsignal(signal.SIGINT) == interrupt
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["own handler"]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_handlers_are_restored_when_the_block_raises():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopRequest():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_ignored_signal_stays_ignored():
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_first_signal_logs_what_will_happen(caplog):
    with caplog.at_level(logging.WARNING), StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGTERM"
    assert "a checkpoint is saved and the run ends. A second signal ends it at once" in caplog.text


def test_nothing_is_installed_outside_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    inside = []

    def work() -> None:
        with StopRequest() as stop:
            inside.append((signal.getsignal(signal.SIGTERM), stop.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [(before, False)]
