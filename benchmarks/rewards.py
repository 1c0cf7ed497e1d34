"""The cost of rewards: a cheap function in processes, with and without the journal, a failing one, programs, math.

Medians over calls; processes are started and warm, except in the row of the first call.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.arguments import parser_of, positive
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, print_rows

from hybridflow.environments.rewards import RewardRunner, RewardScorer, code_reward, math_reward
from hybridflow.environments.rewards.journal import RewardJournal

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
    "none": "pass",
    "raises": "raise ValueError('not this one')",
    "allocates_to_its_limit": "kept = [bytearray(10**7) for _ in range(10**6)]",
    "exits": "os._exit(3)",
    "hangs": "time.sleep(600)",
}
"""The failure of one call in a hundred of a function of 5 ms, by name; a call has timeout_s=0.5."""

FENCE = "`" * 3
PROGRAM = f"""{FENCE}python
def add(a, b):
    return a + b

if __name__ == "__main__":
    print(add(*map(int, input().split())))
{FENCE}"""
"""A function, and a program that calls it with two numbers from its input."""


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Return the median milliseconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def cheap_ms(directory: Path, num_samples: int, *, has_journal: bool) -> float:
    """Return the milliseconds per sample of a cheap function on a batch in two processes."""
    (directory / "cheap.py").write_text(CHEAP)
    runner = RewardRunner(f"{directory}/cheap.py:score", num_processes=2, timeout_s=60.0, memory_bytes=2**30)
    journal = RewardJournal(directory / "rewards", 0, None, failures=False) if has_journal else None
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


def failing_ms(directory: Path, failure: str, num_samples: int) -> float:
    """Return the milliseconds per sample of a failing function on a batch in two processes."""
    (directory / "failing.py").write_text(FAILING.format(failure=failure))
    runner = RewardRunner(f"{directory}/failing.py:score", num_processes=2, timeout_s=0.5, memory_bytes=2**29)
    scorer = RewardScorer(runner=runner, on_error="zero", error_score=-1.0)
    texts = [f"response {number:04}" for number in range(num_samples)]
    wanted = [-1.0 if text.endswith("50") and failure != "pass" else float(len(text)) for text in texts]

    def score() -> None:
        if scorer.score(texts, ["d"] * num_samples, [None] * num_samples).scores.tolist() != wanted:
            raise BenchmarkError(f"a sample without a failure has another score; the failure: {failure!r}.")

    score()
    try:
        return median_ms(score, 3) / num_samples
    finally:
        runner.close()


def main() -> None:
    parser = parser_of(__doc__, None, smoke={"samples": 20, "slow_samples": 100, "failures": ("raises",), "repeats": 1})
    parser.add_argument(
        "--samples", type=positive, default=2000, metavar="N", help="samples of the cheap function (default: 2000)"
    )
    parser.set_defaults(slow_samples=1000, failures=tuple(FAILURES), repeats=25)
    args = parser.parse_args()
    start = time.perf_counter()
    math_reward("math", r"\boxed{1}", "2")
    first = 1000 * (time.perf_counter() - start)
    numbers = iter(range(10**6))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        milliseconds = {
            "cheap_function_per_sample": cheap_ms(directory, args.samples, has_journal=False),
            "cheap_function_with_journal_per_sample": cheap_ms(directory, args.samples, has_journal=True),
        }
        for failure in args.failures:
            milliseconds[f"slow_function_{failure}_per_sample"] = failing_ms(
                directory, FAILURES[failure], args.slow_samples
            )
    milliseconds |= {
        "program_input_output": median_ms(
            lambda: code_reward("code", PROGRAM, {"inputs": ["1 2"], "outputs": ["3"]}), args.repeats
        ),
        "program_statement": median_ms(
            lambda: code_reward("code", PROGRAM, {"tests": ["assert add(1, 2) == 3"]}), args.repeats
        ),
        "math_first_call": first,
        "math_number": median_ms(lambda: math_reward("math", rf"\boxed{{{next(numbers)}}}", "-1"), args.repeats),
        "math_polynomial": median_ms(
            lambda: math_reward("math", rf"\boxed{{(x+1)^2 + {next(numbers)}}}", "x^2 + 2x + 1"), args.repeats
        ),
    }
    print_rows("rewards", [Row(name, "ms", value) for name, value in milliseconds.items()], smoke=args.smoke)


if __name__ == "__main__":
    run(main)
