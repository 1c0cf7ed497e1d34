"""The checks in their order. Small programs run beside the others, each with a time limit, so that none can hang."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hybridflow.trainers.doctor.directory import check_directory
from hybridflow.trainers.doctor.finding import Finding
from hybridflow.trainers.doctor.machine import check_devices, check_open_files, check_shared_memory
from hybridflow.trainers.doctor.network import check_host_name, check_ports
from hybridflow.trainers.doctor.programs import Steps, all_reduce
from hybridflow.trainers.doctor.versions import check_versions, check_vllm


def run_checks(directory: Path) -> Iterator[Finding]:
    """Yield each finding as soon as it is known; `directory` is where runs are written, and need not exist yet."""
    quick: tuple[Callable[[], Finding], ...] = (
        check_versions,
        check_vllm,
        check_devices,
        check_shared_memory,
        check_open_files,
        lambda: check_directory(directory),
        check_host_name,
        check_ports,
    )
    with tempfile.TemporaryDirectory(prefix="hybridflow-doctor-") as scratch:
        programs = [all_reduce(Path(scratch) / "all_reduce")]
        try:
            programs.append(steps := Steps(Path(scratch) / "steps"))
            for check in quick:
                yield check()
            yield programs[0].finding()
            yield from steps.findings()
        finally:
            for program in programs:
                program.stop()
