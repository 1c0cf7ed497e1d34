"""Write a page that shows a run, or several over each other: one HTML file that a browser opens without a network.

It has curves, all responses with filters, responses token by token, the timeline, advice, the configuration and its
differences, failures and recoveries. docs/report.md describes it.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run directories and the file."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="HTML file (default: report.html in the first run)")


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    from hybridflow.cli.inspect.report import write_report
    from hybridflow.runtime.observe.run_files import RunFiles, printable

    output = args.output or args.runs[0] / "report.html"
    size = write_report([RunFiles(path) for path in args.runs], output)
    print(f"report: {printable(output)} ({size / 1e6:.1f} MB); open it in a browser")
    return 0
