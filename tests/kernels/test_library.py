import os
import subprocess
import sys

import pytest
import torch

from hybridflow.kernels import serves

PROGRAM = """
import torch
from hybridflow.kernels import library, serves, rms_norm
library.FLAGS = ("-O0", *library.FLAGS[1:])  # builds in a tenth of the time
print(serves(torch.ones(2)), rms_norm(torch.full((1, 2), 3.0), torch.ones(2), 0.0).tolist())
"""


def run(tmp_path, **environment):
    """Run the program in a new process with a separate cache, because a process builds the library at most once."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)


def test_kernels_are_built_once_into_private_cache_directory(tmp_path):
    assert run(tmp_path).stdout == "True [[1.0, 1.0]]\n"
    directory = tmp_path / "hybridflow"
    assert directory.stat().st_mode & 0o077 == 0
    (built,) = directory.iterdir()
    modified = built.stat().st_mtime_ns
    assert run(tmp_path).stdout == "True [[1.0, 1.0]]\n"
    assert [path.stat().st_mtime_ns for path in directory.iterdir()] == [modified]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 0.5, 1])
def test_damaged_library_in_cache_is_rebuilt(tmp_path, kept):
    assert run(tmp_path).stdout == "True [[1.0, 1.0]]\n"
    (built,) = (tmp_path / "hybridflow").iterdir()
    whole = built.read_bytes()
    built.write_bytes(
        whole[: int(kept * len(whole))] if kept < 1 else whole[: len(whole) // 2].ljust(len(whole), b"\0")
    )
    assert run(tmp_path).stdout == "True [[1.0, 1.0]]\n"
    assert built.stat().st_size == len(whole)


def test_missing_compiler_falls_back_to_pytorch_with_a_warning(tmp_path):
    done = run(tmp_path, CC="no-such-compiler")
    assert done.stdout == "False [[1.0, 1.0]]\n"
    assert "no compiled CPU kernels" in done.stderr
    assert "Install a C compiler" in done.stderr


@pytest.mark.parametrize("compiler", ["false", "\x27gcc"])
def test_failing_compiler_falls_back_to_pytorch(tmp_path, compiler):
    done = run(tmp_path, CC=compiler)
    assert done.stdout == "False [[1.0, 1.0]]\n"
    assert "no compiled CPU kernels" in done.stderr


def test_cache_that_others_can_write_is_not_used(tmp_path):
    directory = tmp_path / "hybridflow"
    directory.mkdir()
    directory.chmod(0o770)
    assert run(tmp_path).stdout == "True [[1.0, 1.0]]\n"
    assert not list(directory.iterdir())


def test_cache_that_cannot_be_created_is_not_an_error(tmp_path):
    (tmp_path / "hybridflow").write_text("in the way")
    assert run(tmp_path).stdout == "True [[1.0, 1.0]]\n"


def test_float64_and_integers_are_computed_by_pytorch():
    assert serves(torch.ones(1))
    assert serves(torch.ones(1, dtype=torch.bfloat16))
    assert not serves(torch.ones(1, dtype=torch.float64))
    assert not serves(torch.ones(1, dtype=torch.int64))
