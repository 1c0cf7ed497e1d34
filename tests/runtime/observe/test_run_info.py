import json
import platform
import subprocess

import torch

from hybridflow import __version__
from hybridflow.runtime.observe import collect_run_info, git_commit

OPTIONS = ("user.name=a", "user.email=a@b", "commit.gpgsign=false", "core.hooksPath=/dev/null")


def git(directory, *arguments):
    command = ["git", "-C", str(directory), *(part for option in OPTIONS for part in ("-c", option)), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_run_info_is_json_with_versions_and_hardware():
    info = collect_run_info()
    assert json.loads(json.dumps(info, allow_nan=False)) == info
    assert info["versions"]["python"] == platform.python_version()
    assert info["versions"]["hybridflow"] == __version__
    assert info["versions"]["torch"] == torch.__version__
    assert info["hardware"]["cpu"]
    assert 1 <= info["hardware"]["usable_cores"] <= info["hardware"]["cores"]
    assert info["hardware"]["memory_bytes"] > 2**28
    assert len(info["hardware"]["gpus"]) == torch.cuda.device_count()


def test_git_commit_has_hash_and_whether_tracked_files_changed(tmp_path):
    assert git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked.txt").write_text("1")
    assert git_commit(tmp_path) == {"commit": commit, "changed": False}
    (tmp_path / "a.py").write_text("2")
    assert git_commit(tmp_path) == {"commit": commit, "changed": True}
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "b.py").write_text("1")
    assert git_commit(installed) is None  # nothing of the directory is tracked
