"""Say what is wrong with a run, why it matters, and which keys to change.

Read from the files of the run directory, also while it trains: the newest steps of metrics.jsonl (as many as
advice.window) and samples.jsonl. What only the metrics of earlier steps show is named at the end;
--steps FIRST-LAST looks at these. Thresholds are keys of [advice], or fixed. The exit status is 0 with and
without findings. --json prints the same as JSON.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.cli.arguments import add_steps
from hybridflow.errors import DataConfigError
from hybridflow.runtime.observe.run_files import printable

if TYPE_CHECKING:
    from hybridflow.runtime.observe.advice import Advice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run directory, the steps and the format."""
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    add_steps(parser, "the newest, as many as advice.window")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the findings, and what was looked at."""
    from hybridflow.runtime.observe.advice import advice_from, earlier_findings
    from hybridflow.runtime.observe.evidence import evidence_of
    from hybridflow.runtime.observe.findings import FINDINGS
    from hybridflow.runtime.observe.run_files import RunFiles

    evidence = evidence_of(RunFiles(args.run))
    if args.steps is not None:
        evidence = evidence.of_steps(args.steps)
        if not evidence.recent or evidence.recent[-1]["step"] not in args.steps:
            raise DataConfigError(f"'{args.run}' has no metrics of these steps; metrics.jsonl shows its steps.")
    advice = advice_from(evidence)
    earlier = earlier_findings(evidence) if args.steps is None else {}
    if args.json:
        looked_at = {
            "steps": evidence.steps,
            "metrics": len(evidence.recent),
            "samples": len(evidence.samples),
            "findings": [finding.name for finding in FINDINGS],
        }
        report = {"looked_at": looked_at, "found": [asdict(each) for each in advice], "found_earlier": earlier}
        print(json.dumps(report, indent=1))
        return 0
    for each in advice:
        print("\n".join(map(printable, _lines(each))), end="\n\n")
    first, last = evidence.steps
    steps = f"steps {first} to {last}" if evidence.recent else "no step yet"
    findings = "finding" if len(advice) == 1 else "findings"
    print(
        f"{len(advice) or 'no'} {findings}; looked for {len(FINDINGS)}, in the metrics of "
        f"{steps} and {len(evidence.samples)} samples"
    )
    if earlier:
        windows = [f"{name} ({_steps(steps)})" for name, steps in earlier.items()]
        print(f"only in earlier steps: {'; '.join(windows)}; look at them with --steps FIRST-LAST")
    return 0


def _steps(windows: Sequence[tuple[int, int]]) -> str:
    """Return the steps of the first windows as text."""
    shown = ", ".join(f"{first}-{last}" for first, last in windows[:3])
    return shown + (f" and {len(windows) - 3} more" if len(windows) > 3 else "")


def _lines(advice: "Advice") -> list[str]:
    return [
        f"{advice.name} ({advice.where})",
        f"  seen  {advice.seen}",
        f"  why   {advice.why}",
        *(f"  {'' if i else 'do':<4}  {change}" for i, change in enumerate(advice.changes)),
    ]
