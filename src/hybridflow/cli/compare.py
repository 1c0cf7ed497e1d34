"""Show what differs between two runs: configuration, versions, prompts and curves.

Metrics that equal runs share come first, by the step at which they first differ; times and memory are left out, unless
--times asks for them.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.aligned import aligned

if TYPE_CHECKING:
    from hybridflow.observability.run_comparison import Comparison, CurveDifference

MOST_CHARS = 60
"""Characters of a value in the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two runs and what is shown."""
    parser.add_argument("a", type=Path, metavar="A", help="directory of a run")
    parser.add_argument("b", type=Path, metavar="B", help="directory of another run")
    parser.add_argument("--metric", default="", metavar="TEXT", help="only metrics whose name contains TEXT")
    parser.add_argument("--times", action="store_true", help="also times, memory and transfers")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    from hybridflow.observability.run_comparison import compare_runs
    from hybridflow.observability.run_files import RunFiles

    found = compare_runs(RunFiles(args.a), RunFiles(args.b))
    if args.json:
        print(json.dumps(_without_nan(asdict(found)), indent=1))
    else:
        print("\n".join(_lines(found, args)))
    return 0


def _lines(found: "Comparison", args: argparse.Namespace) -> list[str]:
    lines = [*_values("configuration", found.config, args), "", *_values("environment", found.environment, args), ""]
    if found.has_prompts:
        step = found.first_other_prompts
        lines += ["prompts: the same in all common steps" if step is None else f"prompts: others from step {step} on"]
    if not found.steps:
        return [*lines, "curves: the runs have no common step"]
    whole = f"steps {found.steps[0]} to {found.steps[-1]} of both"
    lines += [f"curves, {whole}: {found.num_equal} metrics are the same, {len(found.curves)} differ"]
    lines += _curves(found.curves, args)
    for names, path in zip(found.only, (args.a, args.b), strict=True):
        if names:
            lines += [f"only in {path}: {', '.join(names)}"]
    if args.times:
        lines += ["", f"times, memory and transfers, {whole}", *_curves(found.times, args)]
    return lines


def _values(title: str, values: Mapping[str, tuple[Any, Any]], args: argparse.Namespace) -> list[str]:
    if not values:
        return [f"{title}: the same"]
    rows = [[key, *map(_cell, pair)] for key, pair in values.items()]
    return [f"{title}: {len(rows)} differ", *aligned([["", str(args.a), str(args.b)], *rows])]


def _cell(value: Any) -> str:
    text = "-" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 3]}..."


def _curves(curves: Sequence["CurveDifference"], args: argparse.Namespace) -> list[str]:
    rows = [
        [each.name, str(each.first_step), *(f"{number:.4g}" for number in (each.largest, each.mean_a, each.mean_b))]
        for each in curves
        if args.metric in each.name
    ]
    head = ["metric", "from step", "largest difference", f"mean of {args.a}", f"mean of {args.b}"]
    return aligned([head, *rows]) if rows else []


def _without_nan(value: Any) -> Any:
    """Return a value without numbers that JSON lacks; they become texts."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return str(value) if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value
