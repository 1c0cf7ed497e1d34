"""Say what is wrong with a run, why it matters, and which keys to change.

Read from the files of the run directory, also while it trains: the newest steps of metrics.jsonl (as many as
advice.window), samples.jsonl and rollouts.jsonl. The thresholds are the keys of [advice]. The exit status is 0 with and
without findings. --json prints the same as JSON.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridflow.observability.advice.find import Advice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run directory and the format."""
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the findings, and what was looked at."""
    from hybridflow.observability.advice.evidence import evidence_of
    from hybridflow.observability.advice.find import FINDINGS, advice_from
    from hybridflow.observability.run_files import RunFiles

    evidence = evidence_of(RunFiles(args.run))
    advice = advice_from(evidence)
    if args.json:
        looked_at = {
            "steps": evidence.steps,
            "metrics": len(evidence.recent),
            "samples": len(evidence.samples),
            "rollouts": len(evidence.rollouts),
            "findings": [finding.name for finding in FINDINGS],
        }
        print(json.dumps({"looked_at": looked_at, "found": [asdict(each) for each in advice]}, indent=1))
        return 0
    for each in advice:
        print("\n".join(_lines(each)), end="\n\n")
    first, last = evidence.steps
    steps = f"steps {first} to {last}" if evidence.recent else "no step yet"
    print(
        f"{len(advice) or 'no'} finding{'s' * (len(advice) != 1)}; looked for {len(FINDINGS)}, in the metrics of "
        f"{steps}, {len(evidence.samples)} samples and {len(evidence.rollouts)} rows of rollouts"
    )
    return 0


def _lines(advice: "Advice") -> list[str]:
    return [
        f"{advice.name} ({advice.where})",
        f"  seen  {advice.seen}",
        f"  why   {advice.why}",
        *(f"  {'do' * (i == 0):<4}  {change}" for i, change in enumerate(advice.changes)),
    ]
