import ctypes
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.runtime.process_address import allow_observers, own_address


def test_an_address_identifies_this_process():
    address = pickle.loads(pickle.dumps(own_address()))
    assert address == own_address()
    assert (address.pid, address.hostname) == (os.getpid(), socket.gethostname())
    assert str(address.start_ticks) == Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    assert address.pid_namespace == os.readlink("/proc/self/ns/pid")


@pytest.mark.runs
@pytest.mark.own_run("grpo: redirects the output of a process")
def test_log_paths_are_stdout_and_stderr_if_they_are_files(tmp_path):
    program = "from hybridflow.runtime.process_address import own_address; print(own_address().log_paths, flush=True)"
    log = tmp_path / "out.log"
    with open(log, "w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, stderr=out, cwd=tmp_path, check=True)
    assert log.read_text() == f"{(str(log),)}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "()\n"


def test_allow_observers_calls_prctl_as_documented_by_yama(monkeypatch):
    calls = []

    class Libc:
        def prctl(self, *arguments: object) -> int:
            calls.append([part.value if isinstance(part, ctypes.c_ulong) else part for part in arguments])
            return -1  # as without Yama

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc())
    allow_observers()
    assert calls == [[0x59616D61, 2**64 - 1, 0, 0, 0]]  # PR_SET_PTRACER, PR_SET_PTRACER_ANY
