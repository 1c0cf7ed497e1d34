import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading

import pytest

from hybridflow.runtime.python_stacks import StacksError, ThreadStack, own_stacks, read_stacks

OWN_RUN = pytest.mark.own_run("grpo: looks at processes that block in known ways")


def frames_of(threads: list[ThreadStack]) -> str:
    return "\n".join(map(str, threads))


@pytest.mark.exhaustive
@OWN_RUN
def test_repeated_reads_of_running_threads_do_not_disturb_them(observe):
    observed = observe("""
        def recurse(depth):
            return depth and recurse(depth - 1)

        def work():
            at_work.release()
            while True:
                recurse(20)

        at_work = threading.Semaphore(0)
        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
            at_work.acquire()
        for number in range(1, 32):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, lambda *_: os._exit(1))
        print("ready", flush=True)
        work()
        """)
    assert observed.read_line() == "ready"
    while frames_of(read_stacks(observed.process.pid, timeout_s=100)).count(" in work") < 3:
        pass  # the main thread begins to work after it has written
    for _ in range(20):
        threads = read_stacks(observed.process.pid, timeout_s=100)
        assert frames_of(threads).count(" in work") == 3
    assert observed.process.poll() is None  # no signal was sent


@pytest.mark.exhaustive
@OWN_RUN
def test_stacks_name_the_holder_of_the_interpreter_lock_in_c_code(observe, waits_with_the_interpreter_lock):
    observed = observe(waits_with_the_interpreter_lock)
    observed.wait_until_it_sleeps()
    (main,) = read_stacks(observed.process.pid, timeout_s=100)
    assert (main.holds_lock, main.is_active) == (True, False)
    assert main.frames[0].endswith(" in read_with_the_lock")
    assert str(main).startswith("Thread MainThread (idle, holds the interpreter lock):\n")
    observed.write_line()
    assert observed.read_line() == "done"
    assert observed.process.wait() == 0


def test_missing_permission_names_the_setting(monkeypatch):
    said = "Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", said))
    with pytest.raises(StacksError, match=r"kernel.yama.ptrace_scope to 0 or 1, or give the container CAP_SYS_PTRACE"):
        read_stacks(os.getpid(), timeout_s=100)


@pytest.mark.exhaustive
@OWN_RUN
@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_process_of_another_user_raises_missing_permission(observe, waits_for_a_lock, monkeypatch):
    observed = observe(waits_for_a_lock)
    observed.wait_until_it_sleeps()
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: run(*args, **kwargs, user=65534, group=65534))
    with tempfile.TemporaryDirectory() as folder:  # readable by the other user
        os.chmod(folder, 0o755)
        shutil.copy(os.path.join(sysconfig.get_path("scripts"), "py-spy"), folder)
        monkeypatch.setattr(sysconfig, "get_path", lambda _: folder)
        with pytest.raises(StacksError, match="py-spy has no permission to read the memory of the process"):
            read_stacks(observed.process.pid, timeout_s=100)


@pytest.mark.runs
@OWN_RUN
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("#!/bin/sh\nexec sleep 1000\n", r"py-spy did not finish in 0\.2 s\."),
        (
            "#!/bin/sh\necho 'Error: no such version'>&2\necho 'Stack backtrace:\n 0: main'>&2\nexit 3\n",
            r"py-spy failed with exit code 3 \(Error: no such version\)\.",
        ),
        ("not a program", r"py-spy cannot be started \("),
        (None, r"py-spy is not installed; run `pip install py-spy`\."),
    ],
    ids=["too slow", "fails", "no program", "missing"],
)
def test_failure_of_py_spy_raises_with_the_reason(script, says, tmp_path, monkeypatch):
    program = tmp_path / "py-spy"
    if script is not None:
        program.write_text(script)
        program.chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(StacksError, match=says):
        read_stacks(os.getpid(), timeout_s=0.2 if script and "sleep" in script else 100)


def test_own_stacks_show_every_thread_and_line():
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
    assert text.startswith("Thread MainThread, the calling thread (most recent call last):\n")
    assert "in test_own_stacks_show_every_thread_and_line\n    text = own_stacks()\n" in text
    assert "Thread waiter (most recent call last):\n" in text
    assert "in wait_here\n    event.wait()\n" in text
    assert "in own_stacks\n" not in text
