"""Show what differs between two runs: configuration, versions, hardware, data and curves.

Metrics that equal runs share come first, by the step at which they first differ; times, memory and transfers are left
out, unless --times asks for them.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.output import aligned, json_text
from hybridflow.runtime.observe.run_files import printable

if TYPE_CHECKING:
    from hybridflow.cli.inspect.run_comparison import Comparison, CurveDifference

MOST_CHARS = 60
"""Characters of a value in the table."""

MOST_NAMED = 8
"""Metrics that one run lacks, in a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two runs and what is shown."""
    parser.add_argument("a", type=Path, metavar="A", help="directory of a run")
    parser.add_argument("b", type=Path, metavar="B", help="directory of another run")
    parser.add_argument(
        "--metric", default="", metavar="PATTERN", help="only metrics whose name contains it: loss, 'actor/*loss'"
    )
    parser.add_argument("--times", action="store_true", help="also times, memory and transfers")
    parser.add_argument("--json", action="store_true", help="print JSON: all of it")


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    from hybridflow.cli.inspect.run_comparison import compare_runs
    from hybridflow.runtime.observe.run_files import RunFiles

    found = compare_runs(RunFiles(args.a), RunFiles(args.b), f"*{args.metric}*")
    print(json_text(asdict(found)) if args.json else "\n".join(_lines(found, args)))
    return 0


def _lines(found: "Comparison", args: argparse.Namespace) -> list[str]:
    last_a, last_b = found.last_steps
    lines = [printable(f"A: {args.a}, to step {last_a}"), printable(f"B: {args.b}, to step {last_b}"), ""]
    lines += [*_values("configuration", found.config), "", *_values("environment", found.environment), ""]
    if found.data or found.has_data:
        lines += [*_values("data and initial models", found.data), ""]
    if found.has_prompts:
        step = found.first_other_prompts
        lines += [
            "prompts: the same in all common steps" if step is None else f"prompts: others from step {step} on",
            "",
        ]
    lines += _curve_lines(found, args.metric)
    for names, letter in zip(found.only, "AB", strict=True):
        if names:
            more = f", ... ({len(names)} in all)" if len(names) > MOST_NAMED else ""
            lines += [printable(f"only in {letter}: {', '.join(names[:MOST_NAMED])}{more}")]
    if args.times and found.times:
        lines += ["", "times, memory and transfers:", *_table(found.times)]
    return lines


def _curve_lines(found: "Comparison", pattern: str) -> list[str]:
    if not found.steps:
        return ["curves: the runs have no common step"]
    whole = f"all {len(found.steps)} common steps, {found.steps[0]} to {found.steps[-1]}"
    if found.curves:
        return [f"curves, {whole}: {len(found.curves)} differ, {found.num_equal} the same", *_table(found.curves)]
    if found.num_equal:
        return [f"curves: {found.num_equal} the same in {whole}"]
    which = f" whose name contains '{pattern}'" if pattern else ""
    return [printable(f"curves: the runs have no common metric{which} that equal runs share")]


def _values(title: str, values: Mapping[str, tuple[Any, Any]]) -> list[str]:
    if not values:
        return [f"{title}: the same"]
    rows = [[printable(key), *map(_cell, pair)] for key, pair in values.items()]
    return [f"{title}: {len(rows)} differ", *aligned([["", "A", "B"], *rows])]


def _cell(value: Any) -> str:
    text = "-" if value is None else printable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 3]}..."


def _table(curves: Sequence["CurveDifference"]) -> list[str]:
    head = ["", "from step", "largest difference", "last A", "last B", "mean A", "mean B"]
    rows = [
        [
            printable(each.name),
            str(each.first_step),
            *map(_number, (each.largest, each.last_a, each.last_b, each.mean_a, each.mean_b)),
        ]
        for each in curves
    ]
    return aligned([head, *rows])


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else _cell(value)
