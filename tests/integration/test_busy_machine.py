"""A run beside two busy programs has the bits of one on an idle machine: durations reach logs and metrics only."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    pass\n"


@pytest.fixture
def busy_programs():
    programs = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(2)]
    yield
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("grpo", ()),
        ("ppo", ()),
        pytest.param("ppo", ("controller.backend=ray", "controller.cpus_per_worker=0.5"), marks=pytest.mark.ray),
    ],
)
def test_a_run_beside_busy_programs_has_the_same_bits(
    tiny, task, tmp_path, uninterrupted, run_in_turn, busy_programs, name, where
):
    run_in_turn([*tiny.commands(task)[name], *where, f"trainer.run_dir={tmp_path}/run"])
    idle, busy = tiny.results_of(getattr(uninterrupted, name), 6), tiny.results_of(tmp_path / "run", 6)
    assert idle.keys() == busy.keys()
    # Ray draws from Python's random number generator in the driver; our code does not.
    allowed = {"controller.safetensors", "sha256 of files"} if where else set()
    assert {key for key in idle if idle[key] != busy[key]} <= allowed
