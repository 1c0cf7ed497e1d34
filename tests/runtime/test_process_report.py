import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hybridflow.runtime import process_report as process_report_module
from hybridflow.runtime.process_report import Call, ProcessReport, own_stacks, report_process
from hybridflow.runtime.pulse import Pulse, PulseAddress

HEADER = """
import ctypes, faulthandler, os, pickle, re, signal, socket, sys, threading, time
from hybridflow.runtime.pulse import Pulse

pulse = Pulse(interval_s=INTERVAL_S)
pulse.start()
print(pickle.dumps(pulse.address).hex(), flush=True)

"""


@dataclass
class Observed:
    process: subprocess.Popen
    address: PulseAddress

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait_until_it_sleeps(self) -> None:
        assert self.read_line() == "ready"
        wait_until(lambda: read_state(self) == "S")

    def write_line(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@pytest.fixture
def observe(tmp_path) -> Iterator[Callable[..., Observed]]:
    """Start a process with a pulse that runs this program.

    Tests that send the signal whatever the process is doing need a pulse thread at rest: a long interval.
    """
    started: list[subprocess.Popen] = []

    def start(program: str, *arguments: str, interval_s: float = 0.05) -> Observed:
        script = tmp_path / f"observed_{len(started)}.py"
        script.write_text(HEADER.replace("INTERVAL_S", str(interval_s)) + textwrap.dedent(program))
        with open(script.with_suffix(".log"), "w") as log:
            command = [sys.executable, str(script), *arguments]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=tmp_path))
        assert started[-1].stdout is not None
        return Observed(started[-1], pickle.loads(bytes.fromhex(started[-1].stdout.readline())))

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_state(observed: Observed) -> str:
    return Path(f"/proc/{observed.process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def timed_report(observed: Observed, **options) -> tuple[ProcessReport, float]:
    start = time.monotonic()
    report = report_process(observed.address, **options)
    return report, time.monotonic() - start


WAITS_FOR_A_LOCK = """
def wait_for_the_lock():
    lock = threading.Lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()

pulse.begin("ActorWorker.update_actor")
wait_for_the_lock()
"""


def test_of_a_process_that_waits_for_a_lock_the_python_line_is_seen(observe):
    observed = observe(WAITS_FOR_A_LOCK)
    observed.wait_until_it_sleeps()
    report, seconds = timed_report(observed)
    assert report.state == "blocked"
    assert ", line 14 in wait_for_the_lock" in report.stacks
    assert report.call is not None
    assert report.call.what == "ActorWorker.update_actor"
    assert 0 < report.call.seconds < 20
    assert report.last_call is None
    assert report.heartbeat_age_s is not None
    assert report.heartbeat_age_s < 0.65
    assert report.cpu_share is not None
    assert report.cpu_share < 0.5
    assert report.findings == []
    assert [sentence for sentence in report.unseen if sentence.startswith("Frames below Python (C, C++, CUDA)")]
    assert seconds < 2
    text = str(report)
    assert text.startswith(f"Process {observed.process.pid} on {socket.gethostname()} is blocked, for ")
    assert " s in ActorWorker.update_actor; its heartbeat is 0." in text
    assert "in wait_for_the_lock" in text
    assert pickle.loads(pickle.dumps(report)) == report


def test_asking_again_gives_new_stacks_only_and_leaves_no_text_behind(observe):
    observed = observe(WAITS_FOR_A_LOCK)
    observed.wait_until_it_sleeps()
    for _ in range(2):
        assert report_process(observed.address).stacks.count("in wait_for_the_lock") == 1
    assert os.stat(f"/proc/{observed.process.pid}/fd/{observed.address.stack_fd}").st_size == 0


def test_several_observers_take_turns(observe):
    observed = observe(WAITS_FOR_A_LOCK)
    observed.wait_until_it_sleeps()
    reports: list[ProcessReport] = []
    threads = [
        threading.Thread(target=lambda: reports.append(report_process(observed.address, timeout_s=10)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.stacks.count("in wait_for_the_lock") for report in reports] == [1, 1, 1, 1]


def test_a_process_whose_threads_run_python_is_asked_without_a_signal_and_lives(observe):
    # A signal's handler that reads the frames of running threads crashes in one of some ten cases.
    observed = observe("""
        def recurse(depth):
            return depth and recurse(depth - 1)

        def work():
            while True:
                recurse(20)

        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(1))
        work()
        """)
    for _ in range(3):
        report = report_process(observed.address)
        assert report.stacks.count(" in work\n") == 3
    assert report.cpu_share is not None
    assert report.cpu_share > 0.1
    assert observed.process.poll() is None


def test_c_code_that_computes_with_the_interpreter_lock_is_told_by_the_heartbeat(observe):
    observed = observe("""
        def match_for_ever():
            print("ready", flush=True)
            re.match(r"(a+)+$", "a" * 40 + "b")

        with pulse.during("RewardWorker.compute_rewards"):
            match_for_ever()
        """)
    observed.read_line()
    time.sleep(0.8)  # until the heartbeat is old
    report, seconds = timed_report(observed)
    assert report.state == "running"
    assert " in match_for_ever\n" in report.stacks
    assert report.heartbeat_age_s is not None
    assert report.heartbeat_age_s > 0.65
    (finding,) = report.findings
    assert finding.endswith(" s old while the process runs: C code holds the interpreter lock.")
    assert finding in str(report)
    assert seconds < 2
    assert observed.process.poll() is None


WAITS_WITH_THE_INTERPRETER_LOCK = """
def read_with_the_lock():
    print("ready", flush=True)
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)

read_with_the_lock()
print("done", flush=True)
"""


def test_c_code_that_waits_with_the_interpreter_lock_is_told_by_the_heartbeat(observe):
    observed = observe(WAITS_WITH_THE_INTERPRETER_LOCK)
    observed.wait_until_it_sleeps()
    time.sleep(0.8)  # until the heartbeat is old
    report = report_process(observed.address)
    assert report.state == "blocked"
    assert " in read_with_the_lock\n" in report.stacks
    assert report.findings[0].endswith("C code holds the interpreter lock and waits with it.")


def test_the_signal_is_sent_where_a_fresh_heartbeat_stops_answering_and_the_process_goes_on(observe):
    observed = observe(WAITS_WITH_THE_INTERPRETER_LOCK, interval_s=60)
    observed.wait_until_it_sleeps()
    report = report_process(observed.address)
    assert " in read_with_the_lock\n" in report.stacks
    assert report.findings[0].endswith("C code holds the interpreter lock and waits with it.")
    observed.write_line()
    assert observed.read_line() == "done"
    assert observed.process.wait() == 0


def test_a_signal_that_another_handler_took_is_not_sent(observe):
    observed = observe(
        "signal.signal(signal.SIGUSR1, lambda *_: os._exit(1)); time.sleep(0.3)\n" + WAITS_WITH_THE_INTERPRETER_LOCK
    )
    observed.read_line()
    report = report_process(observed.address, timeout_s=2)
    assert report.stacks == ""
    assert (
        "Its stacks: its Python did not answer, and SIGUSR1 has another handler in it: it was not sent."
        in report.unseen
    )
    assert observed.process.poll() is None


def test_a_process_that_gets_no_processor_or_no_time_to_answer_is_not_signalled(observe, monkeypatch):
    observed = observe(WAITS_WITH_THE_INTERPRETER_LOCK)
    observed.wait_until_it_sleeps()
    unseen = report_process(observed.address, timeout_s=0.1).unseen
    assert "Its stacks: its Python did not answer, but only 0.05 s were waited; the signal was not sent." in unseen
    time.sleep(0.8)  # until the heartbeat is old
    monkeypatch.setattr(process_report_module, "_sample", lambda _: ("running", 0.02))
    report = report_process(observed.address)
    assert (
        "Its stacks: its Python did not answer, but it gets hardly any processor; the signal was not sent."
        in report.unseen
    )
    assert report.findings[0].endswith("it is ready to run, but gets 2% of a core: the machine is too busy.")


def test_a_signal_that_would_kill_is_not_sent(observe):
    observed = observe(
        "faulthandler.unregister(signal.SIGUSR1); signal.signal(signal.SIGUSR1, signal.SIG_DFL)\n"
        + WAITS_WITH_THE_INTERPRETER_LOCK
    )
    observed.read_line()
    time.sleep(0.8)  # until the heartbeat is old
    report = report_process(observed.address)
    assert "Its stacks: its Python did not answer, and SIGUSR1 would end it: the signal was not sent." in report.unseen
    assert report.findings[0].endswith("its signal handler is gone: its interpreter is shutting down.")
    assert observed.process.poll() is None


def test_a_stopped_process_is_told_at_once_and_goes_on_later(observe):
    observed = observe(WAITS_FOR_A_LOCK, interval_s=60)
    observed.wait_until_it_sleeps()
    observed.send(signal.SIGSTOP)
    wait_until(lambda: read_state(observed) == "T")
    report, seconds = timed_report(observed)
    assert report.state == "stopped"
    assert report.stacks == ""
    assert "Its stacks: it is stopped and can give none before it is continued (kill -CONT)." in report.unseen
    assert report.findings == ["It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on."]
    assert report.call is not None
    assert seconds < 2
    observed.send(signal.SIGUSR1)  # as if it had been stopped just when the signal came
    observed.send(signal.SIGCONT)
    wait_until(lambda: report_process(observed.address).stacks.count("in wait_for_the_lock") == 1)
    assert observed.process.poll() is None


def test_a_process_stopped_while_it_is_asked_hangs_nobody(observe, monkeypatch):
    observed = observe(WAITS_FOR_A_LOCK)
    observed.wait_until_it_sleeps()
    ask = process_report_module._ask

    def stop_and_ask(address: PulseAddress) -> None:
        observed.send(signal.SIGSTOP)
        wait_until(lambda: read_state(observed) == "T")
        ask(address)

    monkeypatch.setattr(process_report_module, "_ask", stop_and_ask)
    report, seconds = timed_report(observed, timeout_s=0.6)
    assert seconds < 2
    assert report.state == "stopped"
    assert "Its stacks: it is stopped and can give none before it is continued (kill -CONT)." in report.unseen


def test_a_killed_process_is_a_zombie_then_dead_and_its_log_is_shown(observe):
    observed = observe("""
        print("".join(f"line {i}\\n" for i in range(50)), "step 1\\rstep 2\\rstep 3", file=sys.stderr, flush=True)
        print("ready", flush=True)
        time.sleep(60)
        """)
    observed.read_line()
    observed.send(signal.SIGKILL)
    wait_until(lambda: read_state(observed) == "Z")
    report = report_process(observed.address, log_lines=3)
    assert report.state == "zombie"
    assert report.findings == ["It has ended by SIGKILL; its parent has not noticed yet."]
    assert report.unseen == ["What it was doing: its record and its stacks were in its memory and ended with it."]
    assert list(report.log_tail.values()) == ["line 48\nline 49\nstep 3"]
    observed.process.wait()
    report = report_process(observed.address, log_lines=1)
    assert report.state == "dead"
    assert report.findings == ["It has ended."]
    (path,) = observed.address.log_paths
    assert str(report) == (
        f"Process {observed.process.pid} on {socket.gethostname()} is dead.\nIt has ended.\n"
        f"The end of {path}:\n  step 3\n"
        "Not seen:\n  - What it was doing: its record and its stacks were in its memory and ended with it."
    )


def test_an_exit_code_is_shown_while_it_can_be_had(observe):
    observed = observe("sys.exit(3)")
    wait_until(lambda: read_state(observed) == "Z")
    assert report_process(observed.address).findings == [
        "It has ended with exit code 3; its parent has not noticed yet."
    ]


def test_a_process_that_dies_while_it_is_asked_is_dead_but_its_call_is_known(observe, monkeypatch):
    observed = observe(WAITS_FOR_A_LOCK)
    observed.wait_until_it_sleeps()
    monkeypatch.setattr(process_report_module, "_ask", lambda _: observed.process.kill())
    report, seconds = timed_report(observed, timeout_s=10)
    assert seconds < 5
    assert report.state == "zombie"
    assert report.call is not None
    assert report.call.what == "ActorWorker.update_actor"
    assert "Its stacks: it has just ended." in report.unseen


def test_a_reused_pid_is_never_signalled(observe):
    stranger = observe("pulse.stop(); signal.signal(signal.SIGUSR1, signal.SIG_DFL); print(); time.sleep(60)")
    stranger.read_line()
    start_ticks = stranger.address.start_ticks
    address = dataclasses.replace(stranger.address, start_ticks=start_ticks - 1)
    report = report_process(address)
    assert report.state == "dead"
    assert report.findings == [
        f"It has ended; pid {stranger.process.pid} now belongs to another process, which was left alone."
    ]
    assert stranger.process.poll() is None


def test_a_process_whose_pulse_has_stopped_is_neither_signalled_nor_are_its_files_touched(observe, tmp_path):
    observed = observe("""
        address = pulse.address
        pulse.stop()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        with open("mine", "w+") as mine:
            mine.write("contents")
            mine.flush()
            for fd in (address.stack_fd, address.record_fd, address.request_fd):
                os.dup2(mine.fileno(), fd)
            print("ready", flush=True)
            time.sleep(60)
        """)
    observed.wait_until_it_sleeps()
    report = report_process(observed.address)
    assert report.state == "blocked"
    gone = "its memory file is gone: it ended, stopped its Pulse or became another program."
    assert report.unseen == [f"Its heartbeat and its call: {gone}", f"Its stacks: {gone}"]
    assert (tmp_path / "mine").read_text() == "contents"
    assert observed.process.poll() is None


def test_system_calls_that_are_interrupted_go_on(observe):
    # Straight signals: what an observer sends only where Python does not answer.
    observed = observe(
        """
        mine, other = socket.socketpair()
        lock = threading.Lock()
        lock.acquire()
        threading.Timer(1.4, lambda: other.send(b"data")).start()
        threading.Timer(2.1, lock.release).start()
        start = time.monotonic()
        print("ready", flush=True)
        time.sleep(0.7)
        print(time.monotonic() - start > 0.7, mine.recv(4), lock.acquire(), flush=True)
        sys.stdin.readline()
        """,
        interval_s=60,
    )
    observed.read_line()
    for _ in range(3):
        time.sleep(0.1)
        observed.send(signal.SIGUSR1)
        time.sleep(0.2)
        assert "observed_0.py" in report_process(observed.address).stacks
    assert observed.read_line() == "True b'data' True"
    observed.write_line()
    assert observed.process.wait() == 0


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
pulse.begin("ActorWorker.update_actor")
reduce_with_the_others(rank)
pulse.end()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_of_a_process_in_an_all_reduce_that_nobody_joins_the_line_is_seen_and_the_sum_comes_out_later(observe):
    ranks = [observe(ALL_REDUCE, str(rank), interval_s=60) for rank in range(2)]
    assert [rank.read_line() for rank in ranks] == ["ready", "ready"]
    wait_until(lambda: " in all_reduce\n" in report_process(ranks[0].address, timeout_s=10).stacks)
    report = report_process(ranks[0].address, timeout_s=10)
    assert report.state == "blocked"
    assert ", line 18 in reduce_with_the_others\n" in report.stacks
    assert report.call is not None
    assert report.findings == []
    ranks[0].send(signal.SIGUSR1)  # even the signal does not disturb gloo
    ranks[1].write_line()
    assert [rank.read_line() for rank in ranks] == ["[2.0, 2.0, 2.0]"] * 2
    assert [rank.process.wait() for rank in ranks] == [0, 0]


def test_a_process_can_look_at_itself():
    before = signal.getsignal(signal.SIGUSR1)
    pulse = Pulse()
    pulse.start()
    with pulse.during("first"):
        pass
    try:
        report = report_process(pulse.address)
        assert "in test_a_process_can_look_at_itself" in report.stacks
        assert report.call is None
        assert report.last_call is not None
        assert report.last_call.what == "first"
        assert " is running, in no call; first ended " in str(report)
    finally:
        pulse.stop()
        signal.signal(signal.SIGUSR1, before)


def test_on_another_node_nothing_is_claimed(observe):
    observed = observe(WAITS_FOR_A_LOCK)
    address = dataclasses.replace(observed.address, hostname="node7")
    report = report_process(address)
    assert report.state == "unknown"
    assert report.unseen == [f"It runs on node7, this is {socket.gethostname()}: only a process on its node sees it."]
    report = report_process(dataclasses.replace(observed.address, pid_namespace="pid:[1]"))
    assert report.state == "unknown"
    assert report.unseen[0].startswith("It runs in another container (pid namespace)")


def test_without_memory_files_the_state_is_seen_and_the_rest_is_said_to_be_unseen(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    pulse = Pulse()
    pulse.start()
    try:
        report = report_process(pulse.address)
        assert report.state in ("running", "blocked")
        assert [sentence.partition(" (")[0] for sentence in report.unseen] == [
            "Its heartbeat and its call: its system has no /proc or no memory files",
            "Its stacks: its system has no /proc or no memory files",
        ]
        without_proc = dataclasses.replace(pulse.address, start_ticks=None, pid_namespace="")
        assert report_process(without_proc).state == "unknown"
        assert report_process(without_proc).unseen[0].startswith("Anything of it: its system has no /proc or no memory")
    finally:
        pulse.stop()


def test_of_a_large_log_only_the_end_is_read(tmp_path):
    log = tmp_path / "large.log"
    log.write_bytes(b"\xff" * 200_000 + b"\nlast but one\r\nlast\n\n")
    missing = tmp_path / "missing.log"
    pulse = Pulse()
    pulse.start(str(log))
    try:
        paths = (str(log), str(missing))
        report = report_process(dataclasses.replace(pulse.address, log_paths=paths, hostname="node7"))
    finally:
        pulse.stop()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert report.log_tail == {str(log): "last but one\nlast"}
    assert report.unseen[0] == f"Its log {missing}: No such file or directory."


def test_the_text_has_every_part_in_its_place():
    report = ProcessReport(
        pid=7,
        hostname="node7",
        state="blocked",
        heartbeat_age_s=0.25,
        call=Call("ActorWorker.update_actor", 312.04),
        cpu_share=1.5,
        kernel_wait="futex_wait_queue",
        findings=["A finding."],
        stacks='Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n',
        unseen=["Something."],
        log_tail={"a.log": "one\ntwo"},
    )
    assert str(report).splitlines() == [
        "Process 7 on node7 is blocked, for 312.0 s in ActorWorker.update_actor; its heartbeat is 0.2 s old, "
        "it uses 150% of a core, its main thread waits in the kernel's futex_wait_queue.",
        "A finding.",
        "Its Python stacks, most recent call first (the current thread is the one that wrote them):",
        "  Thread 0x1 (most recent call first):",
        '    File "a.py", line 1 in f',
        "The end of a.log:",
        "  one",
        "  two",
        "Not seen:",
        "  - Something.",
    ]


def test_own_stacks_name_every_thread_and_its_place():
    def wait_here() -> None:
        event.wait()

    event = threading.Event()
    thread = threading.Thread(target=wait_here, name="waiter")
    thread.start()
    try:
        text = own_stacks()
    finally:
        event.set()
        thread.join()
    assert text.startswith("Thread MainThread, which asks (most recent call last):\n")
    assert "in test_own_stacks_name_every_thread_and_its_place\n    text = own_stacks()\n" in text
    assert "Thread waiter (most recent call last):\n" in text
    assert "in wait_here\n    event.wait()\n" in text
    assert "in own_stacks\n" not in text
