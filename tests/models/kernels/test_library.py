import os

import pytest
import torch

from hybridflow.models.kernels.library import serves

PROGRAM = """
import torch
from hybridflow.models.kernels import library
from hybridflow.models.kernels.elementwise import rms_norm
from hybridflow.models.kernels.library import serves
library.FLAGS = ("-O0", *library.FLAGS[1:])  # builds in a tenth of the time
print(serves(torch.ones(2)), rms_norm(torch.full((1, 2), 3.0), torch.ones(2), 0.0).tolist())
"""
BUILT, NOT_BUILT = "True [[1.0, 1.0]]\n", "False [[1.0, 1.0]]\n"
own_run = pytest.mark.own_run("grpo: a process builds the library at most once, here in a cache of its own")
exhaustive = pytest.mark.exhaustive


@pytest.fixture
def run(fork_server, tmp_path):
    """Run the program in a new process with a separate cache."""

    def run(**environment):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment}
        return fork_server.run(["-c", PROGRAM], environment=environment)

    return run


@pytest.mark.runs
@own_run
def test_kernels_are_built_once_into_private_cache_and_again_if_damaged(run, tmp_path):
    assert run().stdout == BUILT
    directory = tmp_path / "hybridflow"
    assert directory.stat().st_mode & 0o077 == 0
    (built,) = directory.iterdir()
    modified = built.stat().st_mtime_ns
    assert run().stdout == BUILT
    assert run(CC="no-such-compiler").stdout == BUILT
    assert [path.stat().st_mtime_ns for path in directory.iterdir()] == [modified]
    whole = built.read_bytes()
    built.write_bytes(whole[: len(whole) // 2])
    assert run().stdout == BUILT
    assert built.stat().st_size == len(whole)


@pytest.mark.runs
@own_run
@pytest.mark.parametrize("compiler", ["no-such-compiler", pytest.param("false", marks=exhaustive)])
def test_missing_or_failing_compiler_falls_back_to_pytorch_with_a_warning(run, compiler):
    done = run(CC=compiler)
    assert done.stdout == NOT_BUILT
    assert "no compiled CPU kernels" in done.stderr
    assert ("Install a C compiler" in done.stderr) or compiler != "no-such-compiler"


@pytest.mark.runs
@own_run
@pytest.mark.parametrize("is_file", [False, pytest.param(True, marks=exhaustive)])
def test_cache_that_others_can_write_or_cannot_be_created_is_not_used(run, tmp_path, is_file):
    directory = tmp_path / "hybridflow"
    if is_file:
        directory.write_text("in the way")
    else:
        directory.mkdir()
        directory.chmod(0o770)
    assert run().stdout == BUILT
    assert is_file or not list(directory.iterdir())


def test_float64_and_integers_are_computed_by_pytorch():
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
    assert [serves(torch.ones(1, dtype=dtype)) for dtype in dtypes] == [True, True, False, False]
