"""Runs every test that needs no GPU, with all cases, and writes one line into docs/test-all.md (`make test-all`).

python tests/everything.py             # as long as it takes; exit status 1 if a test failed
python tests/everything.py --check     # warn if the last line is old, or of a commit that is not an ancestor
"""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "test-all.md"
ROW = re.compile(r"^\| (\d{4}-\d\d-\d\d) \| `([0-9a-f]{7,40})` \|", re.MULTILINE)
MAX_AGE = datetime.timedelta(days=14)
PYTEST = ("-m", "pytest", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "--sample", "all")
LANES = {".venv": "not vllm and not gpu", ".venv-vllm": "vllm"}
"""Environment -> marks of the tests that run there; together they are all tests that need no GPU."""
MAX_NAMED = 12


def git(*arguments: str) -> str:
    """Return what a git command prints; "" if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def outcomes_of(report: Path) -> tuple[Counter[str], list[str]]:
    """Return the number of tests by outcome, and the names of those that failed, of a JUnit report."""
    counts: Counter[str] = Counter()
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            name = re.sub(r"@[\w/.]+$", "", case.get("name", ""))  # the group of xdist
            failed.append(f"{case.get('classname', '').removeprefix('tests.')}::{name}")
    return counts, failed


def run_all(extra: list[str]) -> int:
    """Run both environments' tests, add the line, and return the exit status."""
    commit = git("rev-parse", "--short=10", "HEAD")
    changed = " and uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    start, counts, failed = time.monotonic(), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as directory:
        for environment, marks in LANES.items():
            report = Path(directory) / f"{environment}.xml"
            command = [str(ROOT / environment / "bin" / "python"), *PYTEST, "-m", marks, f"--junitxml={report}", *extra]
            subprocess.run(command, cwd=ROOT, check=False)
            if report.exists():
                of_lane, names = outcomes_of(report)
                counts, failed = counts + of_lane, failed + names
            else:
                print(f"error: pytest in {environment} wrote no report (see above); docs/test-all.md has no new line.")
                return 2
    minutes = (time.monotonic() - start) / 60
    named = ", ".join(f"`{name}`" for name in failed[:MAX_NAMED]) + f" and {len(failed) - MAX_NAMED} more" * (
        len(failed) > MAX_NAMED
    )
    text = PAGE.read_text("utf-8").rstrip("\n")
    line = (
        f"| {datetime.date.today()} | `{commit}`{changed} | {counts['passed']:,} | {counts['skipped']:,} "
        f"| {len(failed):,} | {minutes:.0f} min | {named or 'none'} |"
    )
    PAGE.write_text(f"{text}\n{line}\n", "utf-8")
    print(line)
    return 1 if failed else 0


def warning_of(page: str, today: datetime.date, *, is_ancestor: bool) -> str | None:
    """Return why `make test-all` should run again, or None; `page` is the text of docs/test-all.md."""
    rows = ROW.findall(page)
    if not rows:
        return "`make test-all` has not been run; docs/test-all.md has no line."
    date, commit = rows[-1]
    age = today - datetime.date.fromisoformat(date)
    if age > MAX_AGE:
        return f"`make test-all` ran {age.days} days ago ({date}); at most {MAX_AGE.days} are expected: run it again."
    if not is_ancestor:
        return f"`make test-all` ran at {commit}, which is not an ancestor of this commit: run it again."
    return None


def last_commit(page: str) -> str:
    """Return the commit of the last line, "" if there is none."""
    rows = ROW.findall(page)
    return rows[-1][1] if rows else ""


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="warn if the last run is long ago; run nothing")
    arguments, extra = parser.parse_known_args()
    if not arguments.check:
        return run_all(extra)
    page = PAGE.read_text("utf-8")
    known = git("rev-parse", "--verify", "--quiet", f"{last_commit(page)}^{{commit}}")
    is_ancestor = bool(known) and git("merge-base", known, "HEAD") == known
    if warning := warning_of(page, datetime.date.today(), is_ancestor=is_ancestor):
        print(f"warning: {warning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
