"""A check as a process: `python -m hybridflow.doctor.one_check NAME DIRECTORY` prints its finding as JSON."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from hybridflow.doctor.finding import Finding

CHECKS = {
    "versions": "versions:check_versions",
    "vLLM": "versions:check_vllm",
    "devices": "devices:check_devices",
    "shared memory": "machine:check_shared_memory",
    "open files": "machine:check_open_files",
    "run directory": "run_directory:check_run_directory",
    "host name": "network:check_host_name",
    "ports": "network:check_ports",
}
"""Module and function of each check by its name. Only that of the run directory takes an argument, the directory."""


def main() -> None:
    """Run the check that the first argument names."""
    name, directory = sys.argv[1:]
    module, _, function = CHECKS[name].partition(":")
    check: Callable[..., Finding] = getattr(import_module(f"hybridflow.doctor.{module}"), function)
    print(json.dumps(check(Path(directory)) if name == "run directory" else check()))


if __name__ == "__main__":
    main()
