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
from hybridflow.rewards import RewardRunner, supervisor

KINDS = ("child", "session", "double fork", "chain", "stopped")
FUNCTIONS = """
import ctypes, os, signal, sys, time

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
    before = len(os.listdir(ground_truth))  # of a first try
    for kind in extra_info["kinds"]:
        leave(ground_truth, kind)
    while len(os.listdir(ground_truth)) < before + extra_info["num_left"]:
        time.sleep(0.01)
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "kill":
        os.killpg(0, signal.SIGKILL)
    if solution_str == "stop the supervisor":
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(1000)
    if solution_str == "crash":
        ctypes.string_at(0)
    return 1.0
"""
NUM_LEFT = len(KINDS) + 3  # the chain has four

LATE = "took longer than reward.timeout_s=3.0"
ENDS = [
    ("return", None, ""),
    pytest.param("hang", "timeout", LATE, id="hang", marks=pytest.mark.slow),
    pytest.param("stop the supervisor", "timeout", LATE, id="stop the supervisor", marks=pytest.mark.slow),
    ("exit", "died", "ended its process: exit status 3"),
    ("kill", "died", "ended its process: killed by SIGKILL"),
    ("crash", "died", "ended its process: killed by SIGSEGV"),
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


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def pids(directory: Path) -> list[int]:
    return [int(path.name.rpartition(" ")[2]) for path in directory.iterdir()]


def sample(directory, solution, kinds=KINDS, num_left=NUM_LEFT):
    extra_info = {"kinds": kinds, "num_left": num_left}
    return {"data_source": "d", "solution_str": solution, "ground_truth": str(directory), "extra_info": extra_info}


def assert_gone(directory, num_left=NUM_LEFT):
    left = pids(directory)
    assert len(left) == num_left
    deadline = time.monotonic() + 100
    while alive := [path.name for path in directory.iterdir() if is_alive(int(path.name.rpartition(" ")[2]))]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("end", "kind", "problem"), ENDS)
def test_no_process_of_a_function_stays(file, directory, end, kind, problem):
    timeout_s = 3.0 if kind == "timeout" else 200.0
    runner = RewardRunner(f"{file}:score", num_processes=1, timeout_s=timeout_s, memory_bytes=0)
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            (outcome,) = runner.run([(0, sample(directory, end))])
            runner.close()
            assert (outcome.kind, outcome.problem) == (kind, problem)
            assert_gone(directory, NUM_LEFT * (2 if kind == "died" else 1))  # a sample whose process died is retried
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_of_a_function_stays_after_a_killed_run(file, directory, number):
    program = f"""
from hybridflow.rewards import RewardRunner
runner = RewardRunner({f"{file}:score"!r}, num_processes=1, timeout_s=None, memory_bytes=0)
runner.run([(0, {sample(directory, "hang")!r})])
"""
    with subprocess.Popen([sys.executable, "-c", program]) as run:
        while len(pids(directory)) < NUM_LEFT:
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(number)
    assert_gone(directory)


def test_children_are_found_without_the_file_of_children():
    with subprocess.Popen(["sleep", "1000"]) as first, subprocess.Popen(["sleep", "1000"]) as second:
        found = supervisor._children_by_parent(os.getpid())
        assert {first.pid, second.pid} <= set(found)
        assert set(found) == set(supervisor._children_of(os.getpid()))
        assert supervisor._children_by_parent(first.pid) == []
        first.kill()
        second.kill()


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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_that_replaces_itself_all_the_time_is_killed(file, tmp_path):
    file.write_text(HOPPING)
    heartbeat = tmp_path / "heartbeat"
    runner = RewardRunner(f"{file}:score", num_processes=1, timeout_s=200.0, memory_bytes=0)
    (outcome,) = runner.run([(0, sample(heartbeat, "x"))])
    assert outcome.result == 1.0
    while not heartbeat.exists():
        time.sleep(0.01)
    runner.close()
    last = heartbeat.read_text()
    time.sleep(1.0)
    assert heartbeat.read_text() == last


FILES = """
import os, signal, subprocess, tempfile, time

def score(data_source, solution_str, ground_truth, extra_info):
    directory = tempfile.mkdtemp()
    with open(os.path.join(directory, "large"), "wb") as file:
        file.write(bytes(2**20))
    os.mkdir(os.path.join(directory, "locked"), 0)
    open(ground_truth, "w").close()
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "kill the supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    return os.listdir(tempfile.gettempdir()).index(os.path.basename(directory))
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Make the temporary directory of this process and of those that it starts."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return path


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ("return", None),
        ("kill", "died"),
        ("kill the supervisor", "died"),
        pytest.param("hang", "timeout", marks=pytest.mark.slow),
    ],
)
def test_no_temporary_file_of_a_function_stays(file, tmp_path, temporary, end, kind):
    file.write_text(FILES)
    timeout_s = 5.0 if end == "hang" else 200.0
    runner = RewardRunner(f"{file}:score", num_processes=1, timeout_s=timeout_s, memory_bytes=0)
    (outcome,) = runner.run([(0, sample(tmp_path / "ready", end))])
    assert outcome.kind == kind
    assert (tmp_path / "ready").exists()
    if kind is not None:
        assert os.listdir(temporary) == []
    runner.close()
    assert os.listdir(temporary) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_temporary_file_of_a_function_stays_after_a_killed_run(file, tmp_path, temporary, number):
    file.write_text(FILES)
    program = f"""
from hybridflow.rewards import RewardRunner
runner = RewardRunner({f"{file}:score"!r}, num_processes=1, timeout_s=None, memory_bytes=0)
runner.run([(0, {sample(tmp_path / "ready", "hang")!r})])
"""
    with subprocess.Popen([sys.executable, "-c", program]) as run:
        while not (tmp_path / "ready").exists():
            assert run.poll() is None
            time.sleep(0.05)
        assert os.listdir(temporary) != []
        run.send_signal(number)
    wait_until_empty(temporary)


def wait_until_empty(folder):
    deadline = time.monotonic() + 100
    while os.listdir(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(300)
def test_nothing_stays_when_the_child_of_the_rank_is_killed(file, directory, temporary):
    """As Ray kills the children of a worker that exits."""
    before = psutil.Process().children()
    runner = RewardRunner(f"{file}:score", num_processes=1, timeout_s=200.0, memory_bytes=0)
    runner.run([(0, sample(directory, "return"))])
    (child,) = [process for process in psutil.Process().children() if process not in before]
    assert os.listdir(temporary) != []
    child.kill()
    assert_gone(directory)
    wait_until_empty(temporary)
    runner.close()


HANGING_PROGRAM = (
    "```python\nfor i in range(9):\n    open(str(i), 'wb').write(bytes(2**16))\nwhile True:\n    pass\n```"
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_reward_process_leaves_no_directory_of_a_program(temporary):
    kwargs = {"timeout_s": 500.0, "total_timeout_s": 500.0}
    name = "hybridflow.rewards:code_reward"
    runner = RewardRunner(name, num_processes=1, timeout_s=10.0, memory_bytes=0, kwargs=kwargs)
    row = {"data_source": "code", "solution_str": HANGING_PROGRAM, "ground_truth": {"tests": ["f()"]}, "extra_info": {}}
    (outcome,) = runner.run([(0, row)])
    runner.close()
    assert outcome.kind == "timeout"
    assert os.listdir(temporary) == []


def test_a_temporary_directory_that_cannot_be_used_is_an_error(file, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    runner = RewardRunner(f"{file}:score", num_processes=1, timeout_s=200.0, memory_bytes=0)
    with pytest.raises(RewardError, match=r"cannot be made: .*missing/hybridflow-reward-.*set TMPDIR to a directory"):
        runner.run([(0, sample(tmp_path, "return"))])
