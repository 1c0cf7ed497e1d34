"""Learn a step of a run again, alone; with section.key=value once more under these keys, and show what differs.

The replay starts from the newest checkpoint before the step, or from the begin of the run, makes the steps in between,
and compares their metrics with those of the run: they are the same, bit for bit. These keys may change: actor.*,
critic.*, algorithm.*, memory.*, model.dtype, model.compile, controller.threads. The run is only read. The exit status
is 1 if a metric differs from the run's.
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.cli.output import aligned
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from hybridflow.trainers import LearnedStep, Replay

MAX_RESPONSE_CHARS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the step and the changes."""
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run of `hybridflow train`")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys to change")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to learn again")
    parser.add_argument(
        "--samples", type=int, default=5, metavar="N", help="samples to show: those that moved most (default: 5)"
    )


def run(args: argparse.Namespace) -> int:
    """Replay and print the comparison."""
    if not (file := args.run / "config.toml").is_file():
        raise ConfigError(f"'{args.run}' is not the directory of a run: '{file}' does not exist.")
    from hybridflow.trainers import replay_step

    with tempfile.TemporaryDirectory(prefix="replay-", dir=args.run) as scratch:
        replayed = replay_step(args.run, args.step, args.overrides, scratch=Path(scratch))
    print("\n".join(_lines(replayed, args.overrides, max(args.samples, 0))))
    return 1 if replayed.differs else 0


def _lines(replayed: "Replay", changes: list[str], num_samples: int) -> list[str]:
    first = f"the checkpoint of step {replayed.first_step}" if replayed.first_step else "the begin of the run"
    lines = [f"step {replayed.step}, from {first}"]
    for step, names in replayed.differs.items():
        shown = ", ".join(list(names)[:5]) + (", ..." if len(names) > 5 else "")
        lines.append(f"step {step} differs from the run in {len(names)} metrics: {shown}")
    if not replayed.is_recorded:
        lines.append("the run has no metrics of this step to compare with: it has not completed it")
    elif not replayed.differs:
        lines.append("all metrics are those of the run, bit for bit")
    if replayed.changed:
        lines += ["", f"with {' '.join(changes)}:", *_metrics(replayed.learned, replayed.changed)]
    return [*lines, "", *(_samples(replayed, num_samples) if num_samples else [])]


def _metrics(learned: "LearnedStep", changed: "LearnedStep") -> list[str]:
    from hybridflow.runtime.observe.metrics import is_reproducible

    rows = [["metric", "as in the run", "changed"]]
    for name in sorted({*learned.metrics, *changed.metrics}):
        values = [step.metrics.get(name) for step in (learned, changed)]
        if is_reproducible(name) and repr(values[0]) != repr(values[1]):
            rows.append([name, *("-" if value is None else f"{value:.6g}" for value in values)])
    return aligned(rows) if len(rows) > 1 else ["no metric differs"]


def _samples(replayed: "Replay", count: int) -> list[str]:
    """Return the samples whose log-prob the step moved most, or the change moved most."""
    is_changed = replayed.changed is not None
    pairs = list(zip(replayed.learned.samples, (replayed.changed or replayed.learned).samples, strict=True))

    def moved(pair: tuple) -> float:
        return -abs(pair[1].moved - pair[0].moved if is_changed else pair[0].moved)

    heads = ["row", "score", "advantage", "weight", "log-prob before", "after", *["after, changed"] * is_changed]
    rows = [[*heads, "response"]]
    for one, other in sorted(pairs, key=moved)[:count]:
        after = [one.log_prob_after, *[other.log_prob_after] * is_changed]
        numbers = [one.advantage, one.weight, one.log_prob_before, *after]
        text = repr(one.response)[1:-1]
        text = text if len(text) <= MAX_RESPONSE_CHARS else f"{text[:MAX_RESPONSE_CHARS]}..."
        rows.append([str(one.row), f"{one.score:g}", *(f"{number:.4f}" for number in numbers), text])
    what = "the change" if is_changed else "the step"
    return [f"samples that {what} moved most (log-prob: mean of the tokens):", *aligned(rows, ends_with_text=True)]
