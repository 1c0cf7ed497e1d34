"""Check on a CPU whether models of this family train and generate exactly as transformers computes them.

Only config.json is read. A small random copy, with a layer of each kind of the model and few experts, is computed in
float32 by transformers' own code, and in each way in which a run computes rows: packed, padded, with shared prompts,
and token by token in rows and pages that other sequences have used. The table has the largest difference of a log-prob
and of a parameter's gradient. A line that fails names the kind of layer that differs; the exit status is then 1.

A run does the same once for each family and version of torch, transformers and hybridflow, before weights are read.
With --ranks the copy is also sharded over that many processes: over data, or as --tensor, --sequence and others say.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hybridflow.cli.arguments import number
from hybridflow.cli.output import aligned, json_text
from hybridflow.config import ParallelConfig
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from hybridflow.trainers.family_check.check import Report

AXES = tuple(ParallelConfig.model_fields)
MOST_RANKS = 64
COUNT = number(int, lambda count: count > 0, "a positive number")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the layout of ranks, and the format."""
    parser.add_argument("model", metavar="MODEL", help="a model directory, or OWNER/NAME on the Hugging Face hub")
    parser.add_argument("--ranks", type=COUNT, default=1, metavar="N", help="also compare N processes with one")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=COUNT, default=1, metavar="N", help=f"parallel.{axis} of these ranks")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print a line for each way to compute; return 1 if one fails."""
    from hybridflow.models.expert_parallel import require_expert_parallel
    from hybridflow.models.hub import local_model
    from hybridflow.models.loading import model_config
    from hybridflow.trainers.family_check.check import check_layout
    from hybridflow.trainers.family_check.required import report_of

    parallel = ParallelConfig(**{axis: getattr(args, axis) for axis in AXES})
    size, product = parallel.divisor
    if args.ranks % size:
        raise ConfigError(f"{product} does not divide --ranks {args.ranks}; change one of them.")
    if args.ranks > MOST_RANKS:
        raise ConfigError(f"--ranks {args.ranks} is out of range: expected at most {MOST_RANKS} processes.")
    config = model_config(local_model("MODEL", args.model, weights=False))
    require_expert_parallel(config, parallel.expert)
    report = report_of(config, anew=True)
    if args.ranks > 1:
        report = replace(report, findings=(*report.findings, check_layout(config, args.ranks, parallel)))
    if args.json:
        findings = [{**asdict(each), "title": each.title, "is_ok": each.is_ok} for each in report.findings]
        print(json_text({**asdict(report), "findings": findings}))
    else:
        print("\n".join(_lines(report)))
    return int(any(not finding.is_ok for finding in report.findings))


def _lines(report: "Report") -> Iterator[str]:
    """Yield the kinds of layers, the table with the bounds in its last line, and what fails."""
    from hybridflow.trainers.family_check.lines import GRADIENTS, LOG_PROBS

    for kind in report.kinds:
        yield f"{report.model_type} layers: {kind}"
    rows = [["", "log-probs", "gradients", ""]]
    for finding in report.findings:
        difference = finding.difference
        sizes = ["", ""] if difference.error else [f"{difference.log_probs:.1e}", ""]
        if difference.gradients is not None and not difference.error:
            sizes[1] = f"{difference.gradients:.1e}"
        rows.append([finding.title, *sizes, "ok" if finding.is_ok else "FAILED"])
    yield from aligned([*rows, ["at most", f"{LOG_PROBS:.1e}", f"{GRADIENTS:.1e}", ""]], ends_with_text=True)
    if idle := report.without_gradient:
        yield f"{len(idle)} parameters get no gradient: {', '.join(idle[:3])}{', ...' if len(idle) > 3 else ''}"
    yield from report.causes()
