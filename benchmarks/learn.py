"""Every recipe of an algorithm on a small task, from random weights: does it learn?

The task: repeat the number in the prompt as the first of up to four words (`support/echo_task.py`). Each recipe of
recipes/algorithms runs with every seed. The table shows the mean score of the first and of the last five steps over the
seeds, and the spread: the best seed minus the worst. The benchmark fails if a recipe does not learn.
"""

import logging
import statistics
import tempfile
import time
from pathlib import Path

from support.arguments import names_in, parser_of, positive
from support.echo_task import DISTILLATION, OVERLAYS, STEPS, mean_scores, train, write_task, write_teacher
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, print_rows, print_table

ENDS = 5
"""Steps at each end of a run that are averaged."""
LEARNED = 0.3
"""The least improvement from the first to the last steps."""


def main() -> None:
    parser = parser_of(
        __doc__,
        None,
        smoke={"seeds": 1, "only": ("grpo",), "changes": ["trainer.total_steps=2", "controller.threads=1"]},
    )
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each recipe (default: 3)")
    parser.add_argument(
        "--only", type=names_in(list(OVERLAYS)), default=tuple(OVERLAYS), metavar="RECIPE,...", help="these recipes"
    )
    parser.set_defaults(changes=[])
    args = parser.parse_args()
    logging.disable(logging.INFO)
    lines, rows, failed = [], [], []
    with tempfile.TemporaryDirectory() as directory:
        write_task(Path(directory))
        if set(DISTILLATION) & set(args.only):
            write_teacher(Path(directory))
        for name in args.only:
            start = time.perf_counter()
            curves = [mean_scores(train(Path(directory), name, seed, args.changes)) for seed in range(args.seeds)]
            first = statistics.mean(statistics.mean(curve[:ENDS]) for curve in curves)
            of_seeds = [statistics.mean(curve[-ENDS:]) for curve in curves]
            last, spread = statistics.mean(of_seeds), max(of_seeds) - min(of_seeds)
            lines.append((name, *(f"{value:.3f}" for value in (first, last, spread))))
            rows += [
                Row(f"{name}_{key}", "score", value)
                for key, value in (("first", first), ("last", last), ("spread", spread))
            ]
            if not last - first >= LEARNED:
                failed.append(name)
            print(f"{name}: {first:.3f} -> {last:.3f} in {time.perf_counter() - start:.0f} s", flush=True)
    print_table(
        f"mean score, {args.seeds} seeds, {STEPS} steps", ("recipe", "first steps", "last steps", "spread"), lines
    )
    print_rows("learn", rows, smoke=args.smoke)
    if failed and not args.smoke:
        raise BenchmarkError(f"these recipes did not learn: {', '.join(failed)}")


if __name__ == "__main__":
    run(main)
