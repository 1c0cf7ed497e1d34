"""The tests that need a GPU, as parts of a session: pytest in a process of its own, whose lines are kept."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from support.environments import ROOT
from support.errors import BenchmarkError

from gpu_session.record import Teller

TWO_RANKS = "run_jobs_on_gpu"
"""The fixture that runs two ranks on one GPU, in the text of test files that do."""

OUTCOME = re.compile(r"(?:\[gw\d+\] \[ *\d+%\] |(\S+::.+) )(PASSED|FAILED|SKIPPED|ERROR)(?: (\S+::.+))?")
"""The line of a test that has ended: `path::name PASSED [ 10%]`, or of a process, `[gw0] [ 10%] PASSED path::name`."""


def gpu_test_files(word: str = "") -> list[str]:
    """Return the test files that need a GPU, those with `word` in their text."""
    files = sorted((ROOT / "tests").glob("**/test_*_gpu.py"))
    return [str(path.relative_to(ROOT)) for path in files if word in path.read_text("utf-8")]


def changed_test_files(commit: str) -> list[str]:
    """Return the test files of packages that differ from a commit; without one, all."""
    if not commit:
        return gpu_test_files()
    command = ["git", "diff", "--name-only", commit, "--"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).splitlines()[0]
        raise BenchmarkError(
            f"--since {commit}: {reason}; name a commit of this repository, or leave it out."
        ) from None
    paths = [Path(line) for line in done.stdout.splitlines()]
    packages = {path.parts[2] for path in paths if path.parts[:2] == ("src", "hybridflow") and len(path.parts) > 3}
    packages |= {path.parts[1] for path in paths if path.parts[0] == "tests" and len(path.parts) > 2}
    return [file for file in gpu_test_files() if Path(file).parts[1] in packages]


def tests(teller: Teller, files: Sequence[str], log: str, rehearse: bool, processes: int) -> None:
    """Run the tests of files; each failed one is written at once, and all lines of pytest are in `log`.

    `processes` share the GPU where pytest-xdist is installed.
    """
    if not files:
        teller.note("no GPU test is concerned")
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "--timeout", "240"]
    command += ["-p", "no:cacheprovider", *["--rehearse"] * rehearse]
    if processes and importlib.util.find_spec("xdist"):
        command += ["-n", str(processes), "--dist", "loadfile"]
    command += files
    counts: Counter[str] = Counter()
    with (
        open(log, "w", buffering=1) as kept,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            kept.write(line)
            if found := OUTCOME.match(line):
                counts[found[2]] += 1
                if found[2] in ("FAILED", "ERROR"):
                    teller.note(f"{found[2].lower()}: {found[1] or found[3]}")
    passed, total = counts["PASSED"], counts.total()
    teller.figure(f"tests of the part {teller.part} that passed", passed, "1", limit=total, against="all")
    teller.note("tests", **counts, files=len(files))
    if process.returncode:
        raise RuntimeError(f"pytest ended with status {process.returncode}; see {Path(log).name}")
