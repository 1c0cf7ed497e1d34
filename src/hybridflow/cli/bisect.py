"""Find the first step after which a run is lost by a metric, and what in this step loses it.

A metric of validation, such as val/score/mean, is evaluated after a step; one of samples, such as
response_length/mean, is recorded with the next step. Steps are learned again from the checkpoints that the run kept, or
from its begin, with the same bits. Within the step, mini-batches and groups are left out until the metric is kept. The
run is only read. With --try the step is also learned under other keys, on the same samples.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.cli.arguments import number
from hybridflow.cli.output import aligned, json_text
from hybridflow.errors import ConfigError
from hybridflow.runtime.observe.run_files import RunFiles, printable

if TYPE_CHECKING:
    from hybridflow.trainers.run.bisect import Bisection

MOST_CHARS = 70
"""Characters of a prompt's end and of a response that are shown."""

MOST_SAMPLES = 12

COUNT = number(int, lambda count: count >= 0, "a number, such as 32")
VALUE = number(float, math.isfinite, "a finite number, such as 0.5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the metric and its rule, and the changes."""
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run of `hybridflow train`")
    parser.add_argument("--metric", required=True, metavar="NAME", help="a name in metrics.jsonl, as val/score/mean")
    rule = parser.add_mutually_exclusive_group(required=True)
    rule.add_argument("--below", type=VALUE, metavar="X", help="lost where the metric is below X")
    rule.add_argument("--above", type=VALUE, metavar="X", help="lost where the metric is above X")
    rule.add_argument(
        "--rule", metavar="FILE:FUNCTION", help="lost where the function returns True for the metrics, a dictionary"
    )
    parser.add_argument(
        "--from",
        dest="first_kept",
        type=COUNT,
        default=0,
        metavar="STEP",
        help="search after this step, where the metric is not lost (default: 0, the initial model)",
    )
    parser.add_argument(
        "--try",
        dest="tries",
        nargs="+",
        action="append",
        default=[],
        metavar="section.key=value",
        help="also learn the step under these keys; may be given several times",
    )
    parser.add_argument(
        "--removals",
        type=COUNT,
        default=32,
        metavar="N",
        help="evaluations that look for groups within the step, at most (default: 32); 0: find the step only",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: all of it")


def run(args: argparse.Namespace) -> int:
    """Search, and print each value when it is known, then what was found."""
    RunFiles(args.run)
    from hybridflow.trainers.run.bisect import Rule, bisect_run

    if args.rule is not None:
        rule = Rule(args.metric, f"lost by {args.rule}", _loaded(args.rule))
    elif args.below is not None:
        rule = Rule(args.metric, f"below {args.below:g}", lambda metrics: metrics[args.metric] < args.below)
    else:
        rule = Rule(args.metric, f"above {args.above:g}", lambda metrics: metrics[args.metric] > args.above)
    with tempfile.TemporaryDirectory(prefix="bisect-", dir=args.run) as scratch:
        found = bisect_run(
            *(args.run, rule),
            scratch=Path(scratch),
            tries=args.tries,
            first_kept=args.first_kept,
            most_removals=args.removals,
            show=(lambda line: None) if args.json else (lambda line: print(printable(line), flush=True)),
        )
    print(json_text(asdict(found)) if args.json else "\n".join(_lines(found)))
    return 0


def _loaded(name: str) -> Callable[[Mapping[str, float]], bool]:
    from hybridflow.runtime.user_import import load_user_function

    function = load_user_function(name, "--rule", ConfigError)

    def rule(metrics: Mapping[str, float]) -> bool:
        try:
            lost = function(dict(metrics))
        except (Exception, SystemExit) as error:
            raise ConfigError(f"--rule {name} raised {type(error).__name__}: {error}; it gets a dictionary.") from error
        if not isinstance(lost, bool):
            raise ConfigError(f"--rule {name} returned {lost!r:.60}; expected True (lost) or False.")
        return lost

    return rule


def _lines(found: "Bisection") -> list[str]:
    lines = ["", f"{found.metric} is {found.rule} from step {found.step} on"]
    if found.new_keys:
        lines.append(f"step {found.step} is the first of a start with other keys: {' '.join(found.new_keys)}")
        if found.keeping:
            lines.append(f"it is kept with {found.keeping[0]}, so it is lost by the keys")
            return [printable(line) for line in lines]
    if found.mini_batches:
        named = ", ".join(map(str, found.mini_batches))
        lines.append(f"it is kept without mini-batch {named} of the step's {found.num_mini_batches}")
    if found.groups:
        which = "each is needed" if found.is_smallest else "a smaller part may do: raise --removals"
        lines.append(f"it is kept without {len(found.groups)} of its {found.num_groups} groups ({which})")
    elif found.num_groups:
        tried = "" if found.is_smallest else " among those tried (raise --removals)"
        lines.append(f"no removal of a part of its {found.num_groups} groups{tried} keeps it")
    if found.num_groups and not 0 < 2 * len(found.groups) <= found.num_groups:
        lines.append("so it is lost by the keys of the step (--try section.key=value), or by all of its data")
    elif found.groups:
        lines += _samples(found)
    return [printable(line) for line in lines]


def _samples(found: "Bisection") -> list[str]:
    shown = found.samples[:MOST_SAMPLES]
    prompts = {sample.group: sample.prompt for sample in shown}
    lines = [
        f"group {group}: {'...' * (len(text) > MOST_CHARS)}{text[-MOST_CHARS:]}" for group, text in prompts.items()
    ]
    rows = [["group", "score", "advantage", "log-prob before", "after", "response"]]
    for one in shown:
        numbers = (one.advantage, one.log_prob_before, one.log_prob_after)
        text = one.response[:MOST_CHARS] + "..." * (len(one.response) > MOST_CHARS)
        rows.append([str(one.group), f"{one.score:g}", *(f"{number:.4f}" for number in numbers), printable(text)])
    more = len(found.samples) - len(shown)
    return [*lines, *aligned(rows, ends_with_text=True), *([f"{more} more samples: see --json"] if more else [])]
