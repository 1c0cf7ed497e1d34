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


def make(*arguments, **variables):
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)


@pytest.mark.slow
def test_gpu_tests_pass_in_a_rehearsal_without_ray_and_vllm():
    absent = str(ROOT / "tests/fixtures/bare_machine")
    done = make("test-gpu", ENVIRONMENT, "ARGS=-n 0 --rehearse", PYTHONPATH=absent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
    assert "shapes are not checked: beartype is not installed" in done.stdout


@pytest.mark.parametrize("module", ["ray", "beartype", "vllm"])
def test_an_absent_package_cannot_be_imported(module):
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests/fixtures/bare_machine")},
        capture_output=True,
        text=True,
    )
    assert f"import of {module} halted" in done.stderr


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--rehearse"], 1)])
def test_a_warning_fails_a_gpu_test_in_the_rehearsal_only(tmp_path, arguments, status):
    path = tmp_path / "test_of_a_warning.py"
    path.write_text(
        "import pytest, warnings\n@pytest.mark.gpu\ndef test_it():\n    warnings.warn('a split reduction')\n"
    )
    options = ["-c", ROOT / "pyproject.toml", "-p", "conftest", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments, path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "a split reduction" in done.stdout


def test_make_test_gpu_names_every_file_with_gpu_tests_and_installs_nothing():
    plan = make("-n", "test-gpu", ENVIRONMENT)
    assert sorted(re.findall(r"tests/\S+\.py", plan.stdout)) == GPU_TESTS
    assert "pip" not in plan.stdout


def test_parts_of_make_test_gpu_are_its_packages():
    parts = sorted({path.split("/")[1] for path in GPU_TESTS})
    named = [re.findall(r"tests/\S+\.py", make("-n", "test-gpu", ENVIRONMENT, f"PART={part}").stdout) for part in parts]
    assert sorted(path for paths in named for path in paths) == GPU_TESTS
    assert all(path.startswith(f"tests/{part}/") for part, paths in zip(parts, named, strict=True) for path in paths)


def test_an_unknown_part_is_an_error_with_the_parts():
    done = make("-n", "test-gpu", ENVIRONMENT, "PART=trainig")
    assert done.returncode != 0
    assert "PART=trainig has no GPU tests: expected one of" in done.stderr
    assert "engines" in done.stderr


@pytest.mark.slow
def test_without_a_gpu_make_test_gpu_says_so_once():
    done = make("test-gpu", ENVIRONMENT, "PART=observability", "ARGS=-q -n 0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0
    assert done.stderr.count("need a CUDA device") == 1
    assert "`make test-gpu ARGS=--rehearse`" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert " error" not in done.stdout


@pytest.mark.slow
def test_without_a_gpu_the_benchmark_is_an_error_of_one_line():
    done = make("bench-gpu", ENVIRONMENT, "ARGS=--part mfu", CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0
    assert "error: this benchmark needs a CUDA device" in done.stderr
    assert "ARGS=--smoke" in done.stderr
    assert "Traceback" not in done.stderr
    assert "mfu_0.5B" not in done.stdout
