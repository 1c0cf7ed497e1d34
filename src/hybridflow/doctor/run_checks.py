"""All checks in their order: the temporary directory, where the others write; those of one question each; programs.

The small programs run beside the checks of one question.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from hybridflow.doctor.finding import Finding
from hybridflow.doctor.machine import check_temporary_files
from hybridflow.doctor.one_check import CHECKS
from hybridflow.doctor.programs import Program, Steps, all_reduce, check


def run_checks(directory: Path) -> Iterator[Finding]:
    """Yield each finding as soon as it is known; `directory` is where runs are written, and need not exist yet."""
    yield (temporary := check_temporary_files())
    if temporary.state == "error":  # all others write there
        return
    with tempfile.TemporaryDirectory(prefix="hybridflow-doctor-") as text:
        scratch, programs = Path(text), list[Program]()
        try:
            programs += [check(name, directory.absolute(), scratch / str(i)) for i, name in enumerate(CHECKS)]
            programs.append(all_reduce(scratch / "all_reduce"))
            programs.append(steps := Steps(scratch / "steps"))
            for program in programs[:-1]:
                yield program.finding()
            yield from steps.findings()
        finally:
            for program in programs:
                program.stop()
