import os
import signal
import subprocess

import psutil
import pytest


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: a benchmark is interrupted")
def test_an_interrupt_ends_the_sides_and_their_ranks(command):
    with subprocess.Popen(
        command("train_engine", "--smoke", "--repeats", "1000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background inherits "ignore"
    ) as benchmark:
        try:
            assert any(line.startswith("threads on every side") for line in benchmark.stdout)  # all ranks are built
            started = psutil.Process(benchmark.pid).children(recursive=True)
            assert len(started) == 4  # two sides of two ranks
            os.kill(benchmark.pid, signal.SIGINT)
            benchmark.communicate(timeout=300)
        finally:
            benchmark.kill()
    assert benchmark.returncode == 130
    assert psutil.wait_procs(started, timeout=300)[1] == []
