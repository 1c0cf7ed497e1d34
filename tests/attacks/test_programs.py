"""Programs of a model that try to get out, to harm or to cheat; the tables are in fixtures/hostile_programs.py."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import hybridflow
from fixtures.hostile_programs import PROGRAMS

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: programs of a model run in processes of their own")]

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


def failures_of(names: list[str], user: int) -> dict[str, object]:
    """Score these programs as a user and return what does not hold; the user may enter the temporary directory."""
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
    with tempfile.TemporaryDirectory(prefix="attacks-") as directory:
        Path(directory).chmod(0o777)
        environment = {"PATH": os.environ["PATH"], "TMPDIR": directory, "PYTHONPATH": os.pathsep.join(paths)}
        captured = {"capture_output": True, "text": True, "timeout": 1000}
        done = subprocess.run([*command, *names], cwd=directory, env=environment, **captured)
    if done.returncode != 0 and any(word in done.stderr for word in ("unshare failed", "mount:", "setpriv:")):
        pytest.skip(f"running Python as another user failed: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def failures(request) -> dict[str, object]:
    """Return what does not hold of the programs that this session has chosen, scored at the same time."""
    calls = [item.callspec for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return failures_of([call.params["name"] for call in calls], os.geteuid())


@pytest.mark.sampled
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_gets_nothing(failures, name):
    assert name not in failures, f"scores {failures[name]}"


@pytest.mark.timeout(1000)
def test_hostile_programs_leave_nothing_and_honest_ones_pass(failures):
    assert {name: found for name, found in failures.items() if name not in PROGRAMS} == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(1000)
def test_hostile_programs_of_an_ordinary_user_get_and_leave_nothing():
    if os.geteuid() != 0:
        pytest.skip("changing the user requires root; the programs have run as an ordinary user")
    assert failures_of(list(PROGRAMS), ORDINARY_USER) == {}
