"""The Makefile, the benchmarks and the environments of their peers name the same things."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
TARGET = re.compile(r"^([\w-]+):.*\n\t\$\((?:BIN\)/python|PROGRAM\)) benchmarks/(\w+)\.py \$\(ARGS\)$", re.MULTILINE)
WITHOUT_PREFIX = {"chaos", "learn", "rlhf", "soak"}


def test_every_benchmark_has_a_target_and_every_target_its_script():
    expected = {name if name in WITHOUT_PREFIX else f"bench-{name}": name for name in SCRIPTS}
    assert dict(TARGET.findall(MAKEFILE)) == expected


def test_every_target_is_phony():
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)).split()
    assert sorted(phony) == sorted(re.findall(r"^([\w-]+):(?!=)", MAKEFILE, re.MULTILINE))


def test_the_environments_of_peers_are_the_folders_of_the_makefile(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from support.environments import ENVIRONMENTS

    folders = re.findall(r"^\w+_STAMP := (\S+)/\.setup-stamp", MAKEFILE, re.MULTILINE)
    assert sorted(folders) == sorted({*ENVIRONMENTS.values(), ".triton", ".launch"})  # the last two are of tests


@pytest.mark.runs
@pytest.mark.own_run("grpo: it asks make for its plan")
def test_a_smoke_run_builds_no_environment_of_a_peer():
    targets = [target for target, _ in TARGET.findall(MAKEFILE)]
    plan = subprocess.run(["make", "-n", *targets, "ARGS=--smoke"], cwd=ROOT, capture_output=True, text=True)
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.count("--smoke") == len(targets)
    assert not re.findall(r".*(?:\.bench/|\.venv-vllm).*", plan.stdout)


@pytest.mark.runs
def test_a_commit_is_described_with_uncommitted_changes(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from support import commit

    monkeypatch.setattr(commit, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit.describe_commit() == "unknown"

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message=a")
    assert commit.describe_commit() == git("rev-parse", "--short=10", "HEAD")
    (tmp_path / "file").write_text("2")
    assert commit.describe_commit() == git("rev-parse", "--short=10", "HEAD") + " + uncommitted changes"
