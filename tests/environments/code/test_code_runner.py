"""Restrictions and quotas of a program's process, and errors of the scorer itself."""

import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hybridflow.environments.code.code_checks import steps_of
from hybridflow.environments.code.code_runner import MAX_CREATED_FILES, MAX_STARTED_THREADS, CodeLimits, run_program
from hybridflow.errors import RewardError

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: programs of a model run in processes of their own")]

LIMITS = CodeLimits(timeout_s=60.0, memory_bytes=2**28, max_output_bytes=2**20)

COUNT_FILES = """
import errno, os
made = 0
try:
    while True:
        open(str(made), "w").close()
        made += 1
except OSError as error:
    print(made, errno.errorcode[error.errno], len(os.listdir()))
"""

COUNT_THREADS = """
import threading
made = 0
try:
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        made += 1
except RuntimeError as error:
    print(made, error)
"""


def output(program: str) -> str:
    run = run_program(program.encode(), LIMITS)
    assert run.finished
    return run.output.decode()


def test_a_program_may_create_a_number_of_files_and_start_a_number_of_threads():
    assert output(COUNT_FILES).split() == [str(MAX_CREATED_FILES), "EDQUOT", str(MAX_CREATED_FILES + 1)]
    assert output(COUNT_THREADS) == f"{MAX_STARTED_THREADS} can't start new thread\n"
    program = b"def make(n):\n    for i in range(n):\n        open(str(i), 'w').close()\n    return n"
    for number, passes in ((MAX_CREATED_FILES, True), (MAX_CREATED_FILES + 1, False)):
        test = steps_of(f"assert make({number}) == {number}")
        assert run_program(program, LIMITS, test=test).finished == passes


RESTRICTED = """
import os
from hybridflow.environments.code import code_limits
status = open("/proc/self/status")
code_limits.restrict(os.getcwd(), 60.0, 2**30, 2**20)
print(status.read())
"""


def test_a_restricted_process_has_no_capabilities(tmp_path):
    done = subprocess.run([sys.executable, "-c", RESTRICTED], cwd=tmp_path, capture_output=True, text=True, check=True)
    status = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[kind], 16) == 0
    with open("/proc/self/status") as own:
        is_administrator = any(line.startswith("CapEff") and int(line.split()[1], 16) & 1 << 8 for line in own)
    assert int(status["CapBnd"], 16) == 0 or not is_administrator  # CAP_SETPCAP, which the bounding set requires
    assert status["NoNewPrivs"] == "1"


SLEEPS = """
import os, time
with open("new", "w") as file:
    file.write(str(os.getpid()))
os.rename("new", "id")
time.sleep(1000)
"""

SCORER = """
import sys
from hybridflow.environments.code.code_checks import Steps
from hybridflow.environments.code.code_runner import CodeLimits, run_program
run_program(sys.argv[1].encode(), CodeLimits(500.0, 2**28, 2**20), test=Steps("", b""))
"""


@pytest.mark.exhaustive
def test_the_process_of_a_killed_scorer_ends(tmp_path):
    scorer = subprocess.Popen([sys.executable, "-c", SCORER, SLEEPS], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        while not (found := list(tmp_path.glob("hybridflow-code-*/id"))):
            assert scorer.poll() is None
            time.sleep(0.01)
        process = int(found[0].read_text())
        assert is_running(process)
    finally:
        scorer.kill()
        scorer.wait()
    while is_running(process):
        time.sleep(0.01)


def is_running(process: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_a_directory_that_cannot_be_used_is_an_error_that_names_it(small_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    (small_disk / "full").write_bytes(bytes(2**20 - 4096))
    with pytest.raises(RewardError, match=rf"cannot use {small_disk} .*No space left on device.*set TMPDIR"):
        run_program(b"#" * 2**16, LIMITS)
    assert os.listdir(small_disk) == ["full"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(RewardError, match=r"cannot use .*/missing .*No such file or directory.*set TMPDIR"):
        run_program(b"", LIMITS)


def test_too_many_open_files_are_an_error_of_the_scorer(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_program(b"", LIMITS)  # opens what stays open
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # files that other tests left open
    last = os.dup(0)
    os.close(last)
    messages = []
    while messages[-2:] != ["", ""]:  # descriptors above `last` may be in use
        assert len(messages) < 500
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + len(messages), hard))
        try:
            assert run_program(b"f = abs", LIMITS, test=steps_of("assert f(-1) == 1")).finished
            messages.append("")
        except RewardError as error:
            messages.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    num_errors = messages.index("")
    assert num_errors > 3
    assert all("Too many open files" in message for message in messages[:num_errors])
    assert os.listdir(tmp_path) == []
