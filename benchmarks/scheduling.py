"""The assignment of prompts to rollout engines: time of the slowest engine with rollout.schedule "even" and "expected".

    make bench-scheduling
    .venv/bin/python benchmarks/scheduling.py --engines 8 --batches 10

The assignment is the one of a run, the engines are simulated (support/simulated_engines.py); the figures do not depend
on this machine. Lengths of responses are log-normal, their 99th percentile is 8 times the median. `--of-prompt` is the
share of the variance of their logarithm that is the prompt's; the rest differs within a group. Expected is the mean
length of another group of responses to the same prompt, times log-normal noise.

  expected      ratio of the time of "even" to that of "expected"
  assignment    the same, with prompts in their order on each engine
  order         the even split, with the longest expected responses first on each engine
  known         "expected" with the mean lengths of the responses themselves
  stragglers    "expected", and idle engines take half of the sequences of the engine with the most
  stragglers_even  the same with the even split

`--prompts` is the number on each engine: 4 or 16 fit the cache at once, 64 do not.
"""

from collections import deque
from collections.abc import Sequence
from statistics import NormalDist, mean

import numpy as np
from support.arguments import parser_of, positive
from support.program import run
from support.report import Row, print_rows, print_table
from support.simulated_engines import Sequence_, SimulatedEngine, finish_times

from hybridflow.trainers.prompt_assignment import assign_prompts, expected_tokens, prefix_families

MEDIAN, TAIL, LONGEST, PROMPT = 1024, 8, 32768, 512
GROUP_SIZE, CAPACITY, MAX_RUNNING = 8, 500_000, 1024
NOISE = 0.2
"""Standard deviation of the logarithm of expected / past length, as the policy changes between two epochs."""
SCHEDULES = ("expected", "assignment", "order", "known", "stragglers", "stragglers_even")
"""The columns of the table, each as the ratio of the time of "even" to its time."""
SMOKE = {"engines": 2, "batches": 1, "prompts": [4]}


def main() -> None:
    parser = parser_of(__doc__, None, smoke=SMOKE)
    parser.add_argument("--engines", type=positive, default=8, metavar="N", help="engines (default: 8)")
    parser.add_argument("--batches", type=positive, default=10, metavar="N", help="batches of a row (default: 10)")
    parser.add_argument("--prompts", type=positive, nargs="+", default=[4, 16, 64], metavar="N", help="on each engine")
    parser.add_argument("--running", type=positive, default=MAX_RUNNING, metavar="N", help="sequences at once at most")
    parser.add_argument("--of-prompt", type=float, nargs="+", default=[0.25, 0.5, 0.75], metavar="SHARE")
    args = parser.parse_args()
    lines, rows = [], []
    for prompts in args.prompts:
        for share in args.of_prompt:
            times = [measure(prompts, args.engines, args.running, share, seed) for seed in range(args.batches)]
            seconds = {name: mean(each[name] for each in times) / 1e3 for name in times[0]}
            ratios = {name: seconds["even"] / seconds[name] for name in SCHEDULES}
            lines.append((f"{prompts} prompts, {share:.0%} of the prompt", f"{seconds['even']:.0f}"))
            lines[-1] += tuple(f"{ratio:.2f}" for ratio in ratios.values())
            name = f"expected_{prompts}_{round(100 * share)}"
            rows.append(Row(name, "s", seconds["expected"], seconds["even"], seconds["known"], ratios["expected"]))
    print_table("time of the slowest engine", ("on each engine", "even, s", *SCHEDULES), lines)
    print_rows("scheduling", rows, smoke=args.smoke)


def measure(prompts: int, engines: int, running: int, share: float, seed: int) -> dict[str, float]:
    """Return the time of the slowest engine with each schedule, in milliseconds."""
    generator, count = np.random.default_rng(seed), prompts * engines
    sigma = np.log(TAIL) / NormalDist().inv_cdf(0.99)
    of_prompt = generator.normal(0, sigma * share**0.5, (count, 1))

    def group() -> np.ndarray:
        drawn = MEDIAN * np.exp(of_prompt + generator.normal(0, sigma * (1 - share) ** 0.5, (count, GROUP_SIZE)))
        return drawn.round().clip(1, LONGEST).astype(int)

    lengths, past = group(), group().mean(1) * np.exp(generator.normal(0, NOISE, count))
    even = [list(rows) for rows in np.array_split(np.arange(count), engines)]
    scheduled, known = (assigned(expected, engines) for expected in (past, lengths.mean(1)))
    schedules = {
        "even": even,
        "expected": scheduled,
        "assignment": [sorted(rows) for rows in scheduled],
        "order": [sorted(rows, key=lambda row: -past[row]) for rows in even],
        "known": known,
    }
    times = {name: max(finish_times(loaded(rows, lengths, running))) for name, rows in schedules.items()}
    return times | {
        name: max(finish_times(loaded(rows, lengths, running), moves_stragglers=True))
        for name, rows in (("stragglers", scheduled), ("stragglers_even", even))
    }


def assigned(expected: np.ndarray, engines: int) -> list[list[int]]:
    """Return the prompts of each engine, as a run assigns prompts without common prefixes."""
    costs = expected_tokens(np.full(len(expected), PROMPT), expected, GROUP_SIZE).tolist()
    return assign_prompts(costs, prefix_families([[row] for row in range(len(expected))]), [1.0] * engines)


def loaded(rows_of_engines: Sequence[Sequence[int]], lengths: np.ndarray, running: int) -> list[SimulatedEngine]:
    """Return engines on which the responses to their prompts wait, in order."""
    return [
        SimulatedEngine(
            CAPACITY, running, deque(Sequence_(PROMPT, int(length)) for row in rows for length in lengths[row])
        )
        for rows in rows_of_engines
    ]


if __name__ == "__main__":
    run(main)
