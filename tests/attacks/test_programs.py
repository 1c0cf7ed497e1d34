"""Programs of a model that try to get out, to harm or to cheat; the tables are in fixtures/hostile_programs.py."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybridflow
from fixtures.programs_cheating import CHEATS
from fixtures.programs_killed import KILLED
from fixtures.programs_refused import REFUSED

pytestmark = pytest.mark.slow

ORDINARY_USER = 65534
TESTS = Path(__file__).parents[1]
SOURCES = Path(hybridflow.__file__).parents[1]

WITHOUT_LOCKED_PARENT = """
exec 9< "$1"
mount -t tmpfs -o mode=755 none "$2"
mkdir -p "$1"
mount --no-canonicalize --bind /proc/self/fd/9 "$1"
shift 2
exec "$@"
"""
"""Make the directory $1 visible to all users, in a mount namespace, although its parent $2 is locked; run the rest."""


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """Yield a temporary directory that an ordinary user may enter, unlike those of pytest."""
    directory = Path(tempfile.mkdtemp(prefix="attacks-"))
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


def output_of_attacks(directory: Path, user: int) -> str:
    """Score all programs as this user and return what does not hold."""
    command = [sys.executable, "-m", "fixtures.hostile_programs"]
    if user != os.geteuid():
        if not shutil.which("setpriv") or not shutil.which("unshare"):
            pytest.skip("setpriv and unshare of util-linux not found")
        ids = f"--reuid={user}", f"--regid={user}", "--clear-groups"
        command = ["setpriv", *ids, *command]
        prefix = Path(sys.base_prefix)
        locked = [parent for parent in prefix.parents if not parent.stat().st_mode & 0o001]
        if locked:
            command = ["unshare", "-m", "bash", "-euc", WITHOUT_LOCKED_PARENT, "-", prefix, locked[-1], *command]
    paths = [str(SOURCES), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(directory), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    if done.returncode != 0 and any(word in done.stdout for word in ("unshare failed", "mount:", "setpriv:")):
        pytest.skip(f"running Python as another user failed: {done.stdout.strip()}")
    return done.stdout + f"exit status {done.returncode}" * (done.returncode != 0)


def test_hostile_programs_of_this_user_get_nothing_and_leave_nothing(shared_directory):
    assert len(REFUSED) + len(KILLED) + len(CHEATS) > 200
    assert output_of_attacks(shared_directory, os.geteuid()) == ""


def test_hostile_programs_of_an_ordinary_user_get_nothing_and_leave_nothing(shared_directory):
    if os.geteuid() != 0:
        pytest.skip("changing the user requires root; the programs have run as an ordinary user")
    assert output_of_attacks(shared_directory, ORDINARY_USER) == ""
