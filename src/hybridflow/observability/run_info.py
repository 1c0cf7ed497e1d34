"""What a run ran on: versions, commit, hardware. Recorded beside its configuration."""

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
    """Versions (None: not installed), git commit of the checkout hybridflow runs from, hardware; all plain JSON."""
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
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": _gpus(),
        },
    }


def git_commit(directory: str | Path) -> dict[str, Any] | None:
    """`{"commit": hash, "changed": whether tracked files differ from it}`; None where `directory` is in no repository.

    A directory that only lies inside some repository (an installed package) is not of it: git must know a file there.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False
            )
        except OSError:  # no git here
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


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _gpus() -> list[dict[str, Any]]:
    """CUDA devices, if this process has loaded torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": device.name, "memory_bytes": device.total_memory} for device in devices]
