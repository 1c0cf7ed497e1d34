import dataclasses
import pickle
import signal
import socket
from types import SimpleNamespace

import pytest

from hybridflow.runtime import process_report as process_report_module
from hybridflow.runtime.process_address import allow_observers, own_address
from hybridflow.runtime.process_report import ProcessReport, report_process
from hybridflow.runtime.python_stacks import StacksError, ThreadStack


def test_report_shows_the_line_of_a_process_that_waits_for_a_lock(observe, waits_for_a_lock):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    report = report_process(observed.address, timeout_s=100)
    assert report.state == "blocked"
    assert ", line 13 in wait_for_the_lock" in report.stacks
    assert report.cpu_share is not None
    assert report.cpu_share < 0.5
    assert report.memory_bytes is not None
    assert 2**20 < report.memory_bytes < 2**30
    assert report.findings == []
    assert [sentence for sentence in report.unseen if sentence.startswith("Frames below Python (C, C++, CUDA)")]
    text = str(report)
    assert text.startswith(f"Process {observed.process.pid} on {socket.gethostname()} is blocked; it uses ")
    assert "in wait_for_the_lock" in text
    assert pickle.loads(pickle.dumps(report)) == report


def report_when_scheduled(address):
    """Report until the machine gives the process a tenth of a core, as it does unless some ten others compute."""
    while True:
        report = report_process(address, timeout_s=100)
        if report.cpu_share is None or report.cpu_share >= 0.1:
            return report


def test_computing_process_is_running(observe):
    observed = observe("""
        def work():
            print("ready", flush=True)
            total = 0
            while True:
                total += 1

        work()
        """)
    assert observed.read_line() == "ready"
    report = report_when_scheduled(observed.address)
    assert " in work" in report.stacks
    assert report.cpu_share is not None
    assert report.cpu_share >= 0.1
    assert observed.process.poll() is None


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
    assert finding.endswith(
        " samples while the process runs: C code holds the interpreter lock, or a loop in that line does."
    )
    assert finding in str(report)
    assert observed.process.poll() is None


def test_report_names_c_code_that_waits_with_the_interpreter_lock(observe, waits_with_the_interpreter_lock):
    observed = observe(waits_with_the_interpreter_lock)
    observed.wait_until_it_sleeps()
    report = report_process(observed.address, timeout_s=100)
    assert report.state == "blocked"
    assert " in read_with_the_lock" in report.stacks
    assert report.findings == [
        "Thread MainThread held the interpreter lock at the same line in 3 samples while the process sleeps: "
        "C code holds the interpreter lock and waits with it."
    ]
    observed.write_line()
    assert observed.read_line() == "done"


def test_interpreter_lock_that_changes_threads_is_not_reported(monkeypatch):
    samples = iter(
        [
            [ThreadStack("MainThread", True, True, ("line 1",)), ThreadStack("other", True, False, ("line 2",))],
            [ThreadStack("MainThread", True, False, ("line 1",)), ThreadStack("other", True, True, ("line 2",))],
            [ThreadStack("MainThread", True, True, ("line 1",)), ThreadStack("other", True, False, ("line 2",))],
        ]
    )
    monkeypatch.setattr(process_report_module, "read_stacks", lambda pid, timeout_s: next(samples))
    monkeypatch.setattr(process_report_module, "_MAX_SAMPLES", 3)
    report = report_process(own_address())
    assert [finding for finding in report.findings if "interpreter lock" in finding] == []


def test_report_names_a_process_without_cpu_time(observe, waits_for_a_lock, monkeypatch):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    read_stat = process_report_module._read_stat
    monkeypatch.setattr(
        process_report_module, "_read_stat", lambda address: dataclasses.replace(read_stat(address), state="running")
    )
    report = report_process(observed.address, timeout_s=100)
    assert report.state == "running"
    assert report.findings == ["It is ready to run, but gets 0% of a core: the machine is too busy."]


def test_stopped_process_is_reported_with_stacks_and_stays_stopped(observe, waits_for_a_lock):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    observed.send(signal.SIGSTOP)
    observed.wait_for_state("T")
    report = report_process(observed.address, timeout_s=100)
    assert report.state == "stopped"
    assert " in wait_for_the_lock" in report.stacks
    assert report.findings == ["It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on."]
    assert observed.state() == "T"
    observed.send(signal.SIGCONT)
    observed.wait_for_state("S")
    assert report_process(observed.address, timeout_s=100).state == "blocked"


def test_killed_process_is_zombie_then_dead_with_its_log(observe):
    observed = observe("""
        print("".join(f"line {i}\\n" for i in range(50)), "step 1\\rstep 2\\rstep 3", file=sys.stderr, flush=True)
        print("ready", flush=True)
        time.sleep(1000)
        """)
    observed.read_line()
    observed.send(signal.SIGKILL)
    observed.wait_for_state("Z")
    report = report_process(observed.address, log_lines=3)
    assert report.state == "zombie"
    assert report.findings == ["It exited by SIGKILL; its parent process has not collected the exit status yet."]
    assert report.unseen == ["Its Python stacks: the process has exited."]
    assert list(report.log_tail.values()) == ["line 48\nline 49\nstep 3"]
    observed.process.wait()
    report = report_process(observed.address, log_lines=1)
    assert report.state == "dead"
    assert report.findings == ["It has exited."]
    (path,) = observed.address.log_paths
    assert str(report) == (
        f"Process {observed.process.pid} on {socket.gethostname()} is dead.\nIt has exited.\n"
        f"The end of {path}:\n  step 3\n"
        "Not seen:\n  - Its Python stacks: the process has exited."
    )


def test_report_shows_the_exit_code_of_a_zombie(observe):
    observed = observe("sys.exit(3)")
    observed.wait_for_state("Z")
    assert report_process(observed.address).findings == [
        "It exited with exit code 3; its parent process has not collected the exit status yet."
    ]


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
    assert report.state == "zombie"
    assert report.stacks == ""
    assert report.unseen == ["Its Python stacks: the process has exited."]


def test_stacks_of_a_process_that_reused_the_pid_are_not_shown(observe, waits_for_a_lock):
    other = observe(waits_for_a_lock)
    other.wait_until_it_sleeps()
    report = report_process(dataclasses.replace(other.address, start_ticks=other.address.start_ticks - 1))
    assert report.state == "dead"
    assert report.stacks == ""
    assert report.findings == [f"It has exited; pid {other.process.pid} now belongs to another process."]
    assert other.process.poll() is None


def test_report_without_stacks_gives_the_reason(observe, waits_for_a_lock, monkeypatch):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()

    def fail(pid: int, timeout_s: float) -> list[ThreadStack]:
        raise StacksError("py-spy is not installed; run `pip install py-spy`.")

    monkeypatch.setattr(process_report_module, "read_stacks", fail)
    report = report_process(observed.address)
    assert report.state == "blocked"
    assert report.stacks == ""
    assert report.unseen == ["Its Python stacks: py-spy is not installed; run `pip install py-spy`."]


def test_report_after_the_timeout_has_the_stacks_of_one_sample(observe, waits_for_a_lock, monkeypatch):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    timeouts, now = [], [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def read_slowly(pid: int, timeout_s: float) -> list[ThreadStack]:
        timeouts.append(timeout_s)
        sleep(timeout_s)
        return [ThreadStack("MainThread", False, True, ('File "a.py", line 1 in f',))]

    monkeypatch.setattr(process_report_module, "read_stacks", read_slowly)
    monkeypatch.setattr(process_report_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    report = report_process(observed.address, timeout_s=0.3)
    assert timeouts == [0.3]
    assert report.stacks == 'Thread MainThread (idle, holds the interpreter lock):\n  File "a.py", line 1 in f'
    assert report.findings == []  # one sample does not show which thread keeps the lock


ALL_REDUCE = """
import torch
import torch.distributed as dist

def reduce_with_the_others(rank):
    total = torch.ones(3)
    print("ready", flush=True)
    if rank == 1:
        sys.stdin.readline()
    dist.all_reduce(total)
    print(total.tolist(), flush=True)

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
reduce_with_the_others(rank)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_report_of_a_blocked_all_reduce_does_not_disturb_it(observe):
    ranks = [observe(ALL_REDUCE, str(rank)) for rank in range(2)]
    assert [rank.read_line() for rank in ranks] == ["ready", "ready"]
    while " in all_reduce\n" not in report_process(ranks[0].address, timeout_s=100).stacks:
        pass
    report = report_process(ranks[0].address, timeout_s=100)
    assert report.state == "blocked"
    assert ", line 17 in reduce_with_the_others\n" in report.stacks
    assert report.findings == []
    ranks[1].write_line()
    assert [rank.read_line() for rank in ranks] == ["[2.0, 2.0, 2.0]"] * 2
    assert [rank.process.wait() for rank in ranks] == [0, 0]


def test_process_can_report_on_itself():
    allow_observers()
    report = report_process(own_address(), timeout_s=100)
    assert "in test_process_can_report_on_itself" in report.stacks
    assert report.state in ("running", "blocked")


def test_report_from_another_node_has_state_unknown(observe, waits_for_a_lock):
    observed = observe(waits_for_a_lock)
    report = report_process(dataclasses.replace(observed.address, hostname="node7"))
    assert report.state == "unknown"
    assert report.unseen == [
        f"It runs on node7, but this is {socket.gethostname()}: only a process on its node can see it."
    ]
    report = report_process(dataclasses.replace(observed.address, pid_namespace="pid:[1]"))
    assert report.state == "unknown"
    assert report.unseen[0].startswith("It runs in another container (pid namespace)")


def test_report_without_proc_has_state_unknown():
    report = report_process(dataclasses.replace(own_address(), start_ticks=None, pid_namespace=""))
    assert report.state == "unknown"
    assert report.unseen == ["Everything except its log: its system has no /proc."]


def test_of_a_large_log_only_the_end_is_read(tmp_path):
    log = tmp_path / "large.log"
    log.write_bytes(b"\xff" * 200_000 + b"\nlast but one\r\nlast\n\n")
    missing = tmp_path / "missing.log"
    address = dataclasses.replace(own_address(), log_paths=(str(log), str(missing)), hostname="node7")
    report = report_process(address)
    assert report.log_tail == {str(log): "last but one\nlast"}
    assert report.unseen[0] == f"Its log {missing}: No such file or directory."


def test_the_text_has_every_part_in_its_place():
    report = ProcessReport(
        pid=7,
        hostname="node7",
        state="blocked",
        cpu_share=1.5,
        memory_bytes=3 * 2**20,
        kernel_wait="futex_wait_queue",
        findings=["A finding."],
        stacks='Thread MainThread (idle):\n  File "a.py", line 1 in f',
        unseen=["Something."],
        log_tail={"a.log": "one\ntwo"},
    )
    assert str(report).splitlines() == [
        "Process 7 on node7 is blocked; it uses 150% of a core, it has 3 MiB in memory, "
        "its main thread waits in the kernel's futex_wait_queue.",
        "A finding.",
        "Its Python stacks, most recent call first:",
        "  Thread MainThread (idle):",
        '    File "a.py", line 1 in f',
        "The end of a.log:",
        "  one",
        "  two",
        "Not seen:",
        "  - Something.",
    ]
