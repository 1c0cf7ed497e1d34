"""Check this machine before a run: devices, versions, memory, file system, network, an all-reduce, a step.

Each line is ok, a warning (some runs do not work, or slowly) or an error (no run works, or none of some kind), with the
fix below it. A program that hangs counts as an error after two minutes, a check of one question after one.
"""

import argparse
from pathlib import Path

from hybridflow.cli.exit_codes import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the directory of runs."""
    parser.add_argument(
        "--dir", type=Path, default=Path("runs"), help="directory in which runs are written (default: runs)"
    )


def run(args: argparse.Namespace) -> int:
    """Print each finding as it is known; the status is 1 if there is an error."""
    from hybridflow.doctor import run_checks

    has_error = False
    for finding in run_checks(args.dir):
        print(f"{finding.state:<8} {finding.name:<15} {finding.text}", flush=True)
        if finding.fix:
            print(f"{'':<8} fix: {finding.fix}", flush=True)
        has_error |= finding.state == "error"
    return ExitCode.FAILED if has_error else ExitCode.DONE
