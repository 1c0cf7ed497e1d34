"""Tests that need a GPU run on the CPU as a rehearsal, so that a mistake in a test is found without a GPU."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_tests_that_need_a_gpu_pass_in_a_rehearsal_on_the_cpu(request):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "--rehearse"]
    done = subprocess.run(command, cwd=request.config.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout.splitlines()[-1]
