import dataclasses
import re
import signal
import socket

import pytest

from hybridflow.runtime import process_report as process_report_module
from hybridflow.runtime.process_address import own_address
from hybridflow.runtime.process_report import STOPPED, report_process
from hybridflow.runtime.python_stacks import StacksError, ThreadStack

OWN_RUN = pytest.mark.own_run("grpo: looks at processes that block in known ways")
EXITED = "Its Python stacks: the process has exited."


def test_a_report_without_stacks_gives_the_reason(monkeypatch):
    def refuse(pid, timeout_s):
        raise StacksError("py-spy is not installed; run `pip install py-spy`.")

    monkeypatch.setattr(process_report_module, "read_stacks", refuse)
    report = report_process(own_address())
    assert (report.state in ("running", "blocked"), report.stacks) == (True, "")
    assert report.unseen == ["Its Python stacks: py-spy is not installed; run `pip install py-spy`."]


def test_a_process_elsewhere_or_with_a_pid_used_again_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(process_report_module, "read_stacks", lambda pid, timeout_s: [])
    here, own = socket.gethostname(), own_address()
    for changes, unseen in (
        ({"hostname": "node7"}, f"It runs on node7, but this is {here}: only a process on its node can see it."),
        ({"pid_namespace": "pid:[1]"}, "It runs in another container (pid namespace) of this node: only a process in "),
    ):
        report = report_process(dataclasses.replace(own, **changes))
        assert (report.state, report.unseen[0].startswith(unseen)) == ("unknown", True)
    report = report_process(dataclasses.replace(own, start_ticks=own.start_ticks - 1))
    assert (report.state, report.stacks) == ("dead", "")
    assert report.finding == f"It has exited; pid {own.pid} now belongs to another process."


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
    assert (report.state, report.finding) == ("blocked", "")
    assert report.stacks.startswith("Thread MainThread (idle):\n  File ")
    assert 'observed_0.py", line 13 in wait_for_the_lock' in report.stacks
    assert report.memory_bytes is not None
    assert 2**20 < report.memory_bytes < 2**30
    assert [sentence for sentence in report.unseen if sentence.startswith("Frames below Python (C, C++, CUDA)")]
    pid, host = observed.process.pid, socket.gethostname()
    assert re.match(rf"Process {pid} on {host} is blocked; it has \d+ MiB in memory", str(report))

    observed.send(signal.SIGSTOP)
    observed.wait_for_state("T")
    report = report_process(observed.address, timeout_s=100)
    assert (report.state, report.finding, observed.state()) == ("stopped", STOPPED, "T")
    assert " in wait_for_the_lock" in report.stacks

    observed.send(signal.SIGKILL)
    observed.wait_for_state("Z")
    report = report_process(observed.address, log_lines=3)
    assert (report.state, report.unseen) == ("zombie", [EXITED])
    assert report.finding == "It exited by SIGKILL; its parent process has not collected the exit status yet."
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
    finding = "It exited with exit code 3; its parent process has not collected the exit status yet."
    assert report_process(observed.address).finding == finding


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
