"""The environment of a run: versions, commit and hardware, recorded with its configuration."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybridflow import __version__

PACKAGES = ("torch", "transformers", "tensordict", "numpy", "tokenizers")


def collect_run_info() -> dict[str, Any]:
    """Return versions (None: not installed), the git commit of hybridflow's checkout and hardware, as plain JSON."""
    return {
        "command": sys.argv,
        "versions": {
            "hybridflow": __version__,
            "python": platform.python_version(),
            **{name: _installed(name) for name in PACKAGES},
        },
        "git": git_commit(Path(__file__).parent),
        "hardware": {
            "platform": platform.platform(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": _gpus(),
        },
    }


def git_commit(directory: str | Path) -> dict[str, Any] | None:
    """Return `{"commit": hash, "changed": whether tracked files differ from it}`, or None outside a repository.

    None as well for a directory without tracked files, such as an installed package inside a repository.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False
            )
        except OSError:  # git is not installed
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if not commit or not git("ls-files", "."):
        return None
    return {"commit": commit, "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _gpus() -> list[dict[str, Any]]:
    """Return the CUDA devices if this process has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": device.name, "memory_bytes": device.total_memory} for device in devices]
