"""Show the transfers of a run: time, bytes and memory of each worker, latency and bandwidth of each node.

Read from `trace/calls.jsonl` of the run directory, which a run writes with each step. Time is that of packing, sending
and unpacking; memory is the largest resident memory of the process. --json prints the same in seconds and bytes.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.cli.arguments import add_steps
from hybridflow.cli.output import aligned

MIB, MB = 2**20, 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run directory, the steps and the format."""
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    add_steps(parser, "all")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    from hybridflow.runtime.observe import performance_report
    from hybridflow.runtime.observe.run_files import ALL_STEPS

    report = performance_report(args.run, args.steps or ALL_STEPS)
    print(json.dumps(report, indent=1) if args.json else "\n".join(_lines(report)))
    return 0


def _lines(report: Mapping[str, Any]) -> list[str]:
    first, last = report["steps"]
    lines = [
        f"steps {first} to {last}: {report['total_data_transferred'] / MB:.2f} MB in "
        f"{report['total_transfer_time']:.2f} s, {report['average_throughput'] / MB:.1f} MB/s",
        "",
    ]
    head = ["worker", "time (s)", "memory (MiB)", "data (MB)", "throughput (MB/s)"]
    rows = [
        [
            name or "controller",
            f"{worker['time']:.2f}",
            f"{worker['memory'] / MIB:.0f}",
            f"{worker['data_size'] / MB:.2f}",
            f"{worker['throughput'] / MB:.1f}",
        ]
        for name, worker in report["workers"].items()
    ]
    lines += aligned([head, *rows])
    if report["nodes"]:
        head = ["node", "latency (ms)", "bandwidth (MB/s)"]
        rows = [
            [name, f"{1000 * node['latency']:.2f}", f"{node['bandwidth'] / MB:.0f}"]
            for name, node in report["nodes"].items()
        ]
        lines += ["", *aligned([head, *rows])]
    return lines
