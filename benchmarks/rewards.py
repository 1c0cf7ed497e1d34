"""What a reward costs: a cheap function in processes, with the journal and without, one that fails, programs, maths.

Medians of the calls of one process each; the processes are started and warm unless said otherwise.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.report import print_table

from hybridflow.rewards import RewardRunner, RewardScorer, code_reward, math_reward
from hybridflow.rewards.journal import RewardJournal

CHEAP = "def score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str)\n"
FAILING = """
import os, time

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str.endswith("50"):
        {failure}
    time.sleep(0.005)
    return len(solution_str)
"""
FAILURES = {
    "none fails": "pass",
    "one in a hundred raises": "raise ValueError('not this one')",
    "one in a hundred allocates what it may": "kept = [bytearray(10**7) for _ in range(10**6)]",
    "one in a hundred ends its process": "os._exit(3)",
    "one in a hundred hangs, timeout_s=0.5": "time.sleep(600)",
}
"""What a function of 5 ms does wrong, by what the table calls it."""

FENCE = "`" * 3
PROGRAM = f"""{FENCE}python
def add(a, b):
    return a + b

if __name__ == "__main__":
    print(add(*map(int, input().split())))
{FENCE}"""
"""A function, and what reads two numbers where it is run."""


def median_ms(call: Callable[[], Any], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def cheap_ms(directory: Path, num_samples: int, *, journalled: bool) -> float:
    """Milliseconds for each sample of a batch in two processes."""
    (directory / "cheap.py").write_text(CHEAP)
    runner = RewardRunner(f"{directory}/cheap.py:score", num_processes=2, timeout_s=60.0, memory_bytes=2**30)
    journal = RewardJournal(directory / "rewards", 0, None, failures=False) if journalled else None
    scorer = RewardScorer(runner=runner, journal=journal)
    texts = [f"response {number}" for number in range(num_samples)]
    steps = iter(range(100))

    def score() -> None:
        scorer.score(texts, ["d"] * num_samples, [None] * num_samples, step=next(steps))

    score()
    try:
        return median_ms(score, 5) / num_samples
    finally:
        runner.close()


def failing_ms(directory: Path, failure: str, num_samples: int = 1000) -> float:
    """Milliseconds for each sample of a batch in two processes."""
    (directory / "failing.py").write_text(FAILING.format(failure=failure))
    runner = RewardRunner(f"{directory}/failing.py:score", num_processes=2, timeout_s=0.5, memory_bytes=2**29)
    scorer = RewardScorer(runner=runner, on_error="zero", error_score=-1.0)
    texts = [f"response {number:04}" for number in range(num_samples)]
    wanted = [-1.0 if text.endswith("50") and failure != "pass" else float(len(text)) for text in texts]

    def score() -> None:
        if scorer.score(texts, ["d"] * num_samples, [None] * num_samples).scores.tolist() != wanted:
            raise SystemExit(f"a score changed where {failure!r}")

    score()
    try:
        return median_ms(score, 3) / num_samples
    finally:
        runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000, metavar="N", help="of the cheap function (default: 2000)")
    args = parser.parse_args()
    start = time.perf_counter()
    math_reward("math", r"\boxed{1}", "2")
    first = 1000 * (time.perf_counter() - start)
    numbers = iter(range(10**6))
    with tempfile.TemporaryDirectory() as directory:
        rows = {
            "a cheap function, for each sample": cheap_ms(Path(directory), args.samples, journalled=False),
            "the same, journalled": cheap_ms(Path(directory), args.samples, journalled=True),
        } | {f"a function of 5 ms, {name}": failing_ms(Path(directory), failure) for name, failure in FAILURES.items()}
    rows |= {
        "a program, one input and output": median_ms(
            lambda: code_reward("code", PROGRAM, {"inputs": ["1 2"], "outputs": ["3"]}), 15
        ),
        "a program, one statement": median_ms(
            lambda: code_reward("code", PROGRAM, {"tests": ["assert add(1, 2) == 3"]}), 15
        ),
        "mathematics, the first call in a process": first,
        "mathematics, a number": median_ms(lambda: math_reward("math", rf"\boxed{{{next(numbers)}}}", "-1"), 25),
        "mathematics, a polynomial": median_ms(
            lambda: math_reward("math", rf"\boxed{{(x+1)^2 + {next(numbers)}}}", "x^2 + 2x + 1"), 25
        ),
    }
    print_table("milliseconds", ("what", "ms"), [(name, f"{value:.3g}") for name, value in rows.items()])
    print(json.dumps({"benchmark": "rewards", "rows": rows}))


if __name__ == "__main__":
    main()
