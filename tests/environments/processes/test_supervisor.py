"""Processes and files that a reward function has left end with the reward process, however it ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hybridflow.errors import RewardError

pytestmark = [
    pytest.mark.runs,
    pytest.mark.own_run("grpo: its reward function leaves no process"),
    pytest.mark.timeout(300),
]

KINDS = ("child", "session", "double fork", "chain", "stopped")
FUNCTIONS = """
import os, signal, tempfile, time

def stay(directory, kind):
    open(os.path.join(directory, f"{kind} {os.getpid()}"), "w").close()
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(1000)

def leave(directory, kind):
    if os.fork():
        return
    if kind != "child":
        os.setsid()
    if kind == "double fork" and os.fork():
        os._exit(0)
    if kind == "chain":
        for _ in range(3):
            if os.fork():
                stay(directory, kind)
            os.setsid()
    stay(directory, kind)

def score(data_source, solution_str, ground_truth, extra_info):
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "large"), "wb") as file:
        file.write(bytes(2**20))
    os.mkdir(os.path.join(folder, "locked"), 0)
    before = len(os.listdir(ground_truth))  # of a first try
    for kind in extra_info["kinds"]:
        leave(ground_truth, kind)
    while len(os.listdir(ground_truth)) < before + extra_info["num_left"]:
        time.sleep(0.01)
    exec(solution_str, globals())
    return os.listdir(tempfile.gettempdir()).index(os.path.basename(folder))
"""
NUM_LEFT = len(KINDS) + 3  # the chain has four

LATE = "took longer than reward.timeout_s=3.0"
HANG, KILL_SUPERVISOR = "time.sleep(1000)", "os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)"
ENDS = [
    ("", None, ""),
    pytest.param(HANG, "timeout", LATE, marks=pytest.mark.exhaustive),
    pytest.param(f"os.kill(os.getppid(), signal.SIGSTOP); {HANG}", "timeout", LATE, marks=pytest.mark.exhaustive),
    ("os.killpg(0, signal.SIGKILL)", "died", "ended its process: killed by SIGKILL"),
    (KILL_SUPERVISOR, "died", "ended its process: killed by SIGKILL"),
]


@pytest.fixture
def directory(tmp_path):
    """Make a directory in which each process that is left creates a file with its id; kill them in the end."""
    directory = tmp_path / "left"
    directory.mkdir()
    yield directory
    for pid in pids(directory):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids(directory: Path) -> list[int]:
    return [int(path.name.rpartition(" ")[2]) for path in directory.iterdir()]


def sample(directory, solution, kinds=KINDS, num_left=NUM_LEFT):
    extra_info = {"kinds": kinds, "num_left": num_left}
    return {"data_source": "d", "solution_str": solution, "ground_truth": str(directory), "extra_info": extra_info}


def assert_gone(directory, temporary, num_left=NUM_LEFT):
    left = pids(directory)
    assert len(left) == num_left
    deadline = time.monotonic() + 100
    while any(map(psutil.pid_exists, left)) or os.listdir(temporary):
        assert time.monotonic() < deadline, (sorted(os.listdir(directory)), os.listdir(temporary))
        time.sleep(0.02)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Make the temporary directory of this process and of those that it starts."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return path


@pytest.mark.parametrize(("end", "kind", "problem"), ENDS)
def test_no_process_and_no_file_of_a_function_stays(runner, directory, temporary, end, kind, problem):
    scores = runner(timeout_s=3.0 if kind == "timeout" else 200.0, memory_bytes=0)
    num_left = 0 if end == KILL_SUPERVISOR else NUM_LEFT
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            (outcome,) = scores.run([(0, sample(directory, end, KINDS if num_left else (), num_left))])
            if kind is not None:
                assert os.listdir(temporary) == []
            scores.close()
            assert (outcome.kind, outcome.problem) == (kind, problem)
            # a sample whose process died is retried
            assert_gone(directory, temporary, num_left * (2 if kind == "died" else 1))
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_and_no_file_of_a_function_stays_after_a_killed_run(file, directory, temporary, number):
    program = f"""
from hybridflow.environments.rewards import RewardRunner
runner = RewardRunner({f"{file}:score"!r}, num_processes=1, timeout_s=None, memory_bytes=0)
runner.run([(0, {sample(directory, HANG)!r})])
"""
    with subprocess.Popen([sys.executable, "-c", program]) as run:
        while len(pids(directory)) < NUM_LEFT:
            assert run.poll() is None
            time.sleep(0.05)
        assert os.listdir(temporary) != []
        run.send_signal(number)
    assert_gone(directory, temporary)


def test_nothing_stays_when_the_child_of_the_rank_is_killed(runner, directory, temporary):
    """As Ray kills the children of a worker that exits."""
    before = psutil.Process().children()
    runner(memory_bytes=0).run([(0, sample(directory, ""))])
    (child,) = [process for process in psutil.Process().children() if process not in before]
    assert os.listdir(temporary) != []
    child.kill()
    assert_gone(directory, temporary)


HOPPING = """
import os, time

def score(data_source, solution_str, ground_truth, extra_info):
    if os.fork() == 0:
        os.setsid()
        while True:  # each process is replaced by its child
            if os.fork():
                os._exit(0)
            with open(ground_truth, "w") as file:
                file.write(str(os.getpid()))
    return 1.0
"""


@pytest.mark.exhaustive
def test_a_process_that_replaces_itself_all_the_time_is_killed(runner, file, tmp_path):
    file.write_text(HOPPING)
    heartbeat = tmp_path / "heartbeat"
    scores = runner(memory_bytes=0)
    (outcome,) = scores.run([(0, sample(heartbeat, ""))])
    assert outcome.result == 1.0
    while not heartbeat.exists():
        time.sleep(0.01)
    scores.close()
    last = heartbeat.read_text()
    time.sleep(1.0)
    assert heartbeat.read_text() == last


def test_a_temporary_directory_that_cannot_be_used_is_an_error(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(RewardError, match=r"cannot be made: .*missing/hybridflow-reward-.*set TMPDIR to a directory"):
        runner().run([(0, sample(tmp_path, ""))])
