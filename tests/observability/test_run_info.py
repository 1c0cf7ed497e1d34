import json
import platform
import subprocess

import torch

from hybridflow import __version__
from hybridflow.observability import collect_run_info, git_commit


def git(directory, *arguments):
    options = [
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "core.hooksPath=/dev/null",
    ]
    done = subprocess.run(
        ["git", "-C", str(directory), *options, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_run_info_has_versions_and_hardware():
    info = collect_run_info()
    assert info["versions"]["python"] == platform.python_version()
    assert info["versions"]["hybridflow"] == __version__
    assert info["versions"]["torch"] == torch.__version__
    assert info["hardware"]["cpu"]
    assert 1 <= info["hardware"]["usable_cores"] <= info["hardware"]["cores"]
    assert info["hardware"]["memory_bytes"] > 2**28
    assert len(info["hardware"]["gpus"]) == torch.cuda.device_count()


def test_run_info_is_json():
    info = collect_run_info()
    assert json.loads(json.dumps(info, allow_nan=False)) == info


def test_git_commit_has_hash_and_whether_files_changed(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_commit(tmp_path) == {"commit": commit, "changed": False}
    (tmp_path / "untracked.txt").write_text("1")
    assert git_commit(tmp_path) == {"commit": commit, "changed": False}
    (tmp_path / "a.py").write_text("2")
    assert git_commit(tmp_path) == {"commit": commit, "changed": True}


def test_untracked_directory_has_no_commit(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "b.py").write_text("1")
    assert git_commit(installed) is None


def test_directory_outside_a_repository_has_no_commit(tmp_path):
    assert git_commit(tmp_path) is None
