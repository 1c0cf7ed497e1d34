import dataclasses
import pickle
import signal
import socket
import time

import pytest

from hybridflow.runtime import process_report as process_report_module
from hybridflow.runtime.process_address import allow_observers, own_address
from hybridflow.runtime.process_report import ProcessReport, report_process
from hybridflow.runtime.python_stacks import StacksError, ThreadStack


def test_of_a_process_that_waits_for_a_lock_the_python_line_is_seen(observe, waits_for_a_lock):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    report = report_process(observed.address, timeout_s=30)
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


def test_a_process_that_computes_is_running(observe):
    observed = observe("""
        def work():
            print("ready", flush=True)
            total = 0
            while True:
                total += 1

        work()
        """)
    assert observed.read_line() == "ready"
    report = report_process(observed.address, timeout_s=30)
    assert " in work" in report.stacks
    assert report.cpu_share is not None
    assert report.cpu_share > 0.1
    assert observed.process.poll() is None


def test_c_code_that_computes_with_the_interpreter_lock_is_told(observe):
    observed = observe("""
        def match_for_ever():
            print("ready", flush=True)
            re.match(r"(a+)+$", "a" * 40 + "b")

        match_for_ever()
        """)
    observed.read_line()
    time.sleep(0.3)
    report = report_process(observed.address, timeout_s=30)
    assert report.state == "running"
    assert " in match_for_ever" in report.stacks
    (finding,) = report.findings
    assert finding.startswith("Thread MainThread held the interpreter lock at the same line in ")
    assert finding.endswith(
        " looks while the process runs: C code holds the interpreter lock, or a loop in that line does."
    )
    assert finding in str(report)
    assert observed.process.poll() is None


def test_c_code_that_waits_with_the_interpreter_lock_is_told(observe, waits_with_the_interpreter_lock):
    observed = observe(waits_with_the_interpreter_lock)
    observed.wait_until_it_sleeps()
    report = report_process(observed.address, timeout_s=30)
    assert report.state == "blocked"
    assert " in read_with_the_lock" in report.stacks
    assert report.findings == [
        "Thread MainThread held the interpreter lock at the same line in 3 looks while the process sleeps: "
        "C code holds the interpreter lock and waits with it."
    ]
    observed.write_line()
    assert observed.read_line() == "done"


def test_the_interpreter_lock_is_not_blamed_where_it_moves_on(monkeypatch):
    looks = iter(
        [
            [ThreadStack("MainThread", True, True, ("line 1",)), ThreadStack("other", True, False, ("line 2",))],
            [ThreadStack("MainThread", True, False, ("line 1",)), ThreadStack("other", True, True, ("line 2",))],
            [ThreadStack("MainThread", True, True, ("line 1",)), ThreadStack("other", True, False, ("line 2",))],
        ]
    )
    monkeypatch.setattr(process_report_module, "read_stacks", lambda pid, timeout_s: next(looks))
    monkeypatch.setattr(process_report_module, "_MAX_LOOKS", 3)
    report = report_process(own_address())
    assert [finding for finding in report.findings if "interpreter lock" in finding] == []


def test_a_process_that_gets_no_processor_is_told(observe, waits_for_a_lock, monkeypatch):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    read_stat = process_report_module._read_stat
    monkeypatch.setattr(
        process_report_module, "_read_stat", lambda address: dataclasses.replace(read_stat(address), state="running")
    )
    report = report_process(observed.address, timeout_s=30)
    assert report.state == "running"
    assert report.findings == ["It is ready to run, but gets 0% of a core: the machine is too busy."]


def test_a_stopped_process_is_told_with_its_stacks_and_stays_stopped(observe, waits_for_a_lock):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    observed.send(signal.SIGSTOP)
    observed.wait_for_state("T")
    report = report_process(observed.address, timeout_s=30)
    assert report.state == "stopped"
    assert " in wait_for_the_lock" in report.stacks
    assert report.findings == ["It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on."]
    assert observed.state() == "T"
    observed.send(signal.SIGCONT)
    observed.wait_for_state("S")
    assert report_process(observed.address, timeout_s=30).state == "blocked"


def test_a_killed_process_is_a_zombie_then_dead_and_its_log_is_shown(observe):
    observed = observe("""
        print("".join(f"line {i}\\n" for i in range(50)), "step 1\\rstep 2\\rstep 3", file=sys.stderr, flush=True)
        print("ready", flush=True)
        time.sleep(60)
        """)
    observed.read_line()
    observed.send(signal.SIGKILL)
    observed.wait_for_state("Z")
    report = report_process(observed.address, log_lines=3)
    assert report.state == "zombie"
    assert report.findings == ["It has ended by SIGKILL; its parent has not noticed yet."]
    assert report.unseen == ["What it was doing: its stacks were in its memory and ended with it."]
    assert list(report.log_tail.values()) == ["line 48\nline 49\nstep 3"]
    observed.process.wait()
    report = report_process(observed.address, log_lines=1)
    assert report.state == "dead"
    assert report.findings == ["It has ended."]
    (path,) = observed.address.log_paths
    assert str(report) == (
        f"Process {observed.process.pid} on {socket.gethostname()} is dead.\nIt has ended.\n"
        f"The end of {path}:\n  step 3\n"
        "Not seen:\n  - What it was doing: its stacks were in its memory and ended with it."
    )


def test_an_exit_code_is_shown_while_it_can_be_had(observe):
    observed = observe("sys.exit(3)")
    observed.wait_for_state("Z")
    assert report_process(observed.address).findings == [
        "It has ended with exit code 3; its parent has not noticed yet."
    ]


def test_a_process_that_dies_while_it_is_looked_at_is_told_as_ended(observe, waits_for_a_lock, monkeypatch):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    read_stacks = process_report_module.read_stacks

    def kill_and_read(pid: int, timeout_s: float) -> list[ThreadStack]:
        observed.process.kill()
        observed.wait_for_state("Z")
        return read_stacks(pid, timeout_s)

    monkeypatch.setattr(process_report_module, "read_stacks", kill_and_read)
    report = report_process(observed.address, timeout_s=30)
    assert report.state == "zombie"
    assert report.stacks == ""
    assert report.unseen == ["What it was doing: its stacks were in its memory and ended with it."]


def test_stacks_of_a_process_that_reused_the_pid_are_not_shown(observe, waits_for_a_lock):
    stranger = observe(waits_for_a_lock)
    stranger.wait_until_it_sleeps()
    report = report_process(dataclasses.replace(stranger.address, start_ticks=stranger.address.start_ticks - 1))
    assert report.state == "dead"
    assert report.stacks == ""
    assert report.findings == [
        f"It has ended; pid {stranger.process.pid} now belongs to another process, which was left alone."
    ]
    assert stranger.process.poll() is None


def test_without_stacks_the_rest_is_seen_and_the_reason_is_told(observe, waits_for_a_lock, monkeypatch):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()

    def fail(pid: int, timeout_s: float) -> list[ThreadStack]:
        raise StacksError("py-spy is not installed; `pip install py-spy`.")

    monkeypatch.setattr(process_report_module, "read_stacks", fail)
    report = report_process(observed.address)
    assert report.state == "blocked"
    assert report.stacks == ""
    assert report.unseen == ["Its stacks: py-spy is not installed; `pip install py-spy`."]


def test_stacks_of_one_look_are_enough_where_the_time_is_up(observe, waits_for_a_lock, monkeypatch):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    looks = []

    def read_slowly(pid: int, timeout_s: float) -> list[ThreadStack]:
        looks.append(timeout_s)
        time.sleep(timeout_s)
        return [ThreadStack("MainThread", False, True, ('File "a.py", line 1 in f',))]

    monkeypatch.setattr(process_report_module, "read_stacks", read_slowly)
    report = report_process(observed.address, timeout_s=0.3)
    assert len(looks) == 1
    assert report.stacks == 'Thread MainThread (idle, holds the interpreter lock):\n  File "a.py", line 1 in f'
    assert report.findings == []  # one look does not tell who keeps the lock


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
def test_of_a_process_in_an_all_reduce_that_nobody_joins_the_line_is_seen_and_the_sum_comes_out_later(observe):
    ranks = [observe(ALL_REDUCE, str(rank)) for rank in range(2)]
    assert [rank.read_line() for rank in ranks] == ["ready", "ready"]
    deadline = time.monotonic() + 30
    while " in all_reduce\n" not in report_process(ranks[0].address, timeout_s=10).stacks:
        assert time.monotonic() < deadline
    report = report_process(ranks[0].address, timeout_s=10)
    assert report.state == "blocked"
    assert ", line 17 in reduce_with_the_others\n" in report.stacks
    assert report.findings == []
    ranks[1].write_line()
    assert [rank.read_line() for rank in ranks] == ["[2.0, 2.0, 2.0]"] * 2
    assert [rank.process.wait() for rank in ranks] == [0, 0]


def test_a_process_can_look_at_itself():
    allow_observers()
    report = report_process(own_address(), timeout_s=30)
    assert "in test_a_process_can_look_at_itself" in report.stacks
    assert report.state in ("running", "blocked")


def test_on_another_node_nothing_is_claimed(observe, waits_for_a_lock):
    observed = observe(waits_for_a_lock)
    report = report_process(dataclasses.replace(observed.address, hostname="node7"))
    assert report.state == "unknown"
    assert report.unseen == [f"It runs on node7, this is {socket.gethostname()}: only a process on its node sees it."]
    report = report_process(dataclasses.replace(observed.address, pid_namespace="pid:[1]"))
    assert report.state == "unknown"
    assert report.unseen[0].startswith("It runs in another container (pid namespace)")


def test_without_proc_nothing_is_claimed():
    report = report_process(dataclasses.replace(own_address(), start_ticks=None, pid_namespace=""))
    assert report.state == "unknown"
    assert report.unseen == ["Anything of it: its system has no /proc."]


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
