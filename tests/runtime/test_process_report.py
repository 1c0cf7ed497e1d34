import dataclasses
import re
import signal
import socket
from itertools import count
from types import SimpleNamespace

import pytest

from hybridflow.runtime import process_report as process_report_module
from hybridflow.runtime.process_address import own_address
from hybridflow.runtime.process_report import report_process
from hybridflow.runtime.python_stacks import StacksError, ThreadStack

OWN_RUN = pytest.mark.own_run("grpo: looks at processes that block in known ways")
STOPPED = "It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on."
EXITED = "Its Python stacks: the process has exited."
LOCKED = "Thread MainThread held the interpreter lock at the same line in 3 samples while the process "
WAITS = f"{LOCKED}sleeps: C code holds the interpreter lock and waits with it."
COMPUTES = f"{LOCKED}runs: C code holds the interpreter lock, or a loop in that line does."
STARVED = "It is ready to run, but gets 0% of a core: the machine is too busy."


@pytest.fixture
def sampled(monkeypatch):
    """Return `sampled(rows, timeout_s=9)`, which reports on a process that each sample finds as a row says.

    A row: the state, the CPU time in ms since the row before, the holder of the interpreter lock and its line, and
    whether that thread computes.
    """

    def report(rows, timeout_s=9.0):
        now, number, timeouts = [0.0], count(), []

        def sleep(seconds):
            now[0] += seconds

        def read_stacks(pid, seconds):
            timeouts.append(seconds)
            if isinstance(rows, str):
                raise StacksError(rows)
            _, _, (holder, line), is_active = rows[min(next(number), len(rows) - 1)]
            sleep(0.05)
            names = ("MainThread", "other")
            return [ThreadStack(each, is_active, each == holder, (f'File "a.py", line {line} in f',)) for each in names]

        stats = []

        def read_stat(address):
            state, ms, *_ = ("blocked", 0) if isinstance(rows, str) else rows[min(len(stats), len(rows) - 1)]
            ticks = (stats[-1].cpu_ticks if stats else 0) + ms // 10
            stats.append(process_report_module._Stat(state, ticks, 5 * 2**20, 0))
            return stats[-1]

        monkeypatch.setattr(process_report_module, "read_stacks", read_stacks)
        monkeypatch.setattr(process_report_module, "_read_stat", read_stat)
        monkeypatch.setattr(process_report_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        return report_process(own_address(), timeout_s=timeout_s), timeouts

    return report


MAIN, OTHER, NONE = ("MainThread", 1), ("other", 2), ("", 0)


@pytest.mark.parametrize(
    ("rows", "state", "findings"),
    [
        ([("blocked", 0, NONE, False)], "blocked", []),
        ([("running", 100, NONE, True)], "running", []),
        ([("running", 100, NONE, True), ("blocked", 0, NONE, False)], "blocked", []),  # two of three
        ([("running", 0, NONE, True)], "running", [STARVED]),
        ([("running", 0, NONE, True)] * 5 + [("running", 900, NONE, True)], "running", []),  # it is scheduled later
        ([("running", 100, NONE, True)] * 2 + [("stopped", 0, NONE, False)], "stopped", [STOPPED]),
        ([("blocked", 0, MAIN, False)], "blocked", [WAITS]),
        ([("running", 100, MAIN, True)], "running", [COMPUTES]),
        ([("blocked", 0, MAIN, False), ("blocked", 0, OTHER, False), ("blocked", 0, MAIN, False)], "blocked", []),
        ([("blocked", 0, MAIN, False), ("blocked", 0, ("MainThread", 7), False)], "blocked", []),  # it goes on
    ],
)
def test_samples_tell_the_state_and_who_keeps_the_interpreter_lock(sampled, rows, state, findings):
    report, _ = sampled(rows)
    assert (report.state, report.findings, report.memory_bytes) == (state, findings, 5 * 2**20)
    assert report.cpu_share is not None


def test_after_the_timeout_the_stacks_are_those_of_one_sample(sampled):
    report, timeouts = sampled([("blocked", 0, MAIN, False)], timeout_s=0.05)
    assert timeouts == [0.05]
    assert report.stacks.startswith('Thread MainThread (idle, holds the interpreter lock):\n  File "a.py", line 1 in f')
    assert report.findings == []  # one sample does not show which thread keeps the lock


def test_a_report_without_stacks_gives_the_reason(sampled):
    report, timeouts = sampled("py-spy is not installed; run `pip install py-spy`.")
    assert (report.state, report.stacks, len(timeouts)) == ("blocked", "", 1)
    assert report.unseen == ["Its Python stacks: py-spy is not installed; run `pip install py-spy`."]


def test_a_process_elsewhere_or_with_a_pid_used_again_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(process_report_module, "read_stacks", lambda pid, timeout_s: [])
    here, own = socket.gethostname(), own_address()
    for changes, unseen in (
        ({"hostname": "node7"}, f"It runs on node7, but this is {here}: only a process on its node can see it."),
        ({"pid_namespace": "pid:[1]"}, "It runs in another container (pid namespace) of this node: only a process in "),
        ({"start_ticks": None, "pid_namespace": ""}, "Everything except its log: its system has no /proc."),
    ):
        report = report_process(dataclasses.replace(own, **changes))
        assert (report.state, report.unseen[0].startswith(unseen)) == ("unknown", True)
    report = report_process(dataclasses.replace(own, start_ticks=own.start_ticks - 1))
    assert (report.state, report.stacks) == ("dead", "")
    assert report.findings == [f"It has exited; pid {own.pid} now belongs to another process."]


def test_of_a_large_log_only_the_end_is_read(tmp_path):
    log, missing = tmp_path / "large.log", tmp_path / "missing.log"
    log.write_bytes(b"\xff" * 200_000 + b"\nlast but one\r\nstep 1\rlast\n\n")
    address = dataclasses.replace(own_address(), log_paths=(str(log), str(missing)), hostname="node7")
    report = report_process(address)
    assert report.log_tail == {str(log): "last but one\nlast"}
    assert report.unseen[0] == f"Its log {missing}: No such file or directory."
    assert report_process(address, log_lines=1).log_tail == {str(log): "last"}
    log.write_text("before\nFatal Python error: Segmentation fault\nCurrent thread:\n  File 1\n  File 2\n")
    crash = "Fatal Python error: Segmentation fault\n  File 2"
    assert report_process(address, log_lines=1).log_tail == {str(log): crash}  # what happened, below a deep stack


@pytest.mark.runs
@OWN_RUN
def test_a_process_is_reported_as_blocked_stopped_zombie_and_dead(observe, waits_for_a_lock, monkeypatch):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    monkeypatch.setenv("PATH", "/nowhere")  # py-spy is next to the interpreter
    report = report_process(observed.address, timeout_s=100)
    assert (report.state, report.findings) == ("blocked", [])
    assert report.stacks.startswith("Thread MainThread (idle):\n  File ")
    assert 'observed_0.py", line 13 in wait_for_the_lock' in report.stacks
    assert report.cpu_share is not None
    assert report.cpu_share < 0.5
    assert report.memory_bytes is not None
    assert 2**20 < report.memory_bytes < 2**30
    assert [sentence for sentence in report.unseen if sentence.startswith("Frames below Python (C, C++, CUDA)")]
    pid, host = observed.process.pid, socket.gethostname()
    assert re.match(rf"Process {pid} on {host} is blocked; it uses \d+% of a core, it has \d+ MiB in m", str(report))

    observed.send(signal.SIGSTOP)
    observed.wait_for_state("T")
    report = report_process(observed.address, timeout_s=100)
    assert (report.state, report.findings, observed.state()) == ("stopped", [STOPPED], "T")
    assert " in wait_for_the_lock" in report.stacks

    observed.send(signal.SIGKILL)
    observed.wait_for_state("Z")
    report = report_process(observed.address, log_lines=3)
    assert (report.state, report.unseen) == ("zombie", [EXITED])
    assert report.findings == ["It exited by SIGKILL; its parent process has not collected the exit status yet."]
    observed.process.wait()
    (path,) = observed.address.log_paths
    with open(path, "w") as log:
        log.write("line 1\nline 2\n")
    assert str(report_process(observed.address, log_lines=1)) == (
        f"Process {pid} on {host} is dead.\nIt has exited.\nThe end of {path}:\n  line 2\nNot seen:\n  - {EXITED}"
    )


@pytest.mark.runs
@OWN_RUN
def test_report_shows_the_exit_code_of_a_zombie(observe):
    observed = observe("sys.exit(3)")
    observed.wait_for_state("Z")
    assert report_process(observed.address).findings == [
        "It exited with exit code 3; its parent process has not collected the exit status yet."
    ]


def report_when_scheduled(address):
    """Report until the machine gives the process a tenth of a core, as it does unless some ten others compute."""
    while True:
        report = report_process(address, timeout_s=100)
        if report.cpu_share is None or report.cpu_share >= 0.1:
            return report


@pytest.mark.exhaustive
@OWN_RUN
def test_report_names_c_code_that_computes_with_the_interpreter_lock(observe):
    observed = observe("""
        def match_for_ever():
            print("ready", flush=True)
            re.match(r"(a+)+$", "a" * 40 + "b")

        match_for_ever()
        """)
    observed.read_line()
    while not (report := report_when_scheduled(observed.address)).findings:
        pass  # it may still be at the line before
    assert report.state == "running"
    assert " in match_for_ever" in report.stacks
    (finding,) = report.findings
    assert finding.startswith("Thread MainThread held the interpreter lock at the same line in ")
    assert finding.endswith("while the process runs: C code holds the interpreter lock, or a loop in that line does.")
    assert observed.process.poll() is None


@pytest.mark.exhaustive
@OWN_RUN
def test_process_that_dies_during_the_report_is_reported_as_zombie(observe, waits_for_a_lock, monkeypatch):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    read_stacks = process_report_module.read_stacks

    def kill_and_read(pid: int, timeout_s: float) -> list[ThreadStack]:
        observed.process.kill()
        observed.wait_for_state("Z")
        return read_stacks(pid, timeout_s)

    monkeypatch.setattr(process_report_module, "read_stacks", kill_and_read)
    report = report_process(observed.address, timeout_s=100)
    assert (report.state, report.stacks, report.unseen) == ("zombie", "", [EXITED])
