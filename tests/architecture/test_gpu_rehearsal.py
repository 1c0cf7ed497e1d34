"""Tests that need a GPU run on the CPU as a rehearsal, by `make test-gpu`, as on a machine with few packages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = f"BIN={Path(sys.executable).parent}"
GPU_TESTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests").glob("*/**/test_*.py")
    if re.search(r"\bmark\.gpu\b", path.read_text("utf-8")) and path != Path(__file__)
)
pytestmark = pytest.mark.own_run("grpo: runs make")


def make(*arguments, **variables):
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)


@pytest.mark.exhaustive
def test_gpu_tests_pass_in_a_rehearsal_without_ray_and_vllm():
    absent = str(ROOT / "tests/fixtures/bare_machine")
    for module in ("ray", "beartype", "vllm"):
        program = [sys.executable, "-c", f"import {module}"]
        done = subprocess.run(program, env={**os.environ, "PYTHONPATH": absent}, capture_output=True, text=True)
        assert f"import of {module} halted" in done.stderr
    done = make("test-gpu", ENVIRONMENT, "ARGS=-n 0 --rehearse", PYTHONPATH=absent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
    assert "shapes are not checked: beartype is not installed" in done.stdout


@pytest.mark.runs
def test_make_test_gpu_names_every_gpu_test_and_installs_nothing():
    plan = make("-n", "test-gpu", ENVIRONMENT)
    assert sorted(re.findall(r"tests/\S+\.py", plan.stdout)) == GPU_TESTS
    assert "pip" not in plan.stdout
    parts = sorted({path.split("/")[1] for path in GPU_TESTS})
    for part in parts:
        plan = make("-n", "test-gpu", ENVIRONMENT, f"PART={part}")
        of_part = [path for path in GPU_TESTS if path.startswith(f"tests/{part}/")]
        assert sorted(re.findall(r"tests/\S+\.py", plan.stdout)) == of_part
    done = make("-n", "test-gpu", ENVIRONMENT, "PART=trainig")
    assert done.returncode != 0
    assert f"PART=trainig has no GPU tests: expected one of {' '.join(parts)}" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["test-gpu", "PART=runtime", "ARGS=-q -n 0"], "need a CUDA device", "`make test-gpu ARGS=--rehearse`"),
        (["bench-gpu", "ARGS=--part mfu"], "error: this benchmark needs a CUDA device", "ARGS=--smoke"),
    ],
)
def test_without_a_gpu_one_line_says_so(arguments, error, hint):
    done = make(*arguments, ENVIRONMENT, CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0
    assert done.stderr.count(error) == 1
    assert hint in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "mfu_0.5B" not in done.stdout
