"""One GRPO step, generation + reward + one update: hybridflow's trainer against TRL's GRPOTrainer, on CPU.

A model of 3.4M parameters, 32 prompts of 6 tokens, 8 responses of exactly 32 tokens each, one optimizer step on all
256 samples, no KL term, the same learning rate and reward. Both sides compute in bfloat16 (weights stay float32) and
in float32; the faster dtype of each is compared. Besides, both sides make two float32 steps on the same rows of
different lengths, with KL, clipping and a temperature: losses, log-probs, every element of the gradient and the change
of every parameter must agree, and errors planted on our side must be noticed, or the benchmark fails. `--model 135M`:
a larger model, with 8 prompts, in bfloat16 and without that comparison.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from support import grpo_task as task
from support.agreement import compare_with_trl, print_agreement, require_noticed, rows_of
from support.arguments import parser_of
from support.environments import python_of
from support.errors import BenchmarkError
from support.grpo_files import write_task
from support.limits import PEAK_SIZES, Peaks, generation_flops, update_flops
from support.models import MODELS, write_model
from support.program import run
from support.record_comparison import Comparison, require_agreement
from support.report import Row, figure, print_rows, print_sides, print_table
from support.rounds import alternate
from support.side import Side
from support.trl_settings import trl_settings

from hybridflow.config import load_config
from hybridflow.models.model_sizes import decoder_shape
from hybridflow.runtime.threads import count_physical_cores, set_num_threads

OURS, PEER = "hybridflow", "trl"
DTYPES = ("bfloat16", "float32")
MAKE_TARGET = "bench-grpo_step"
MIB = 2**20


@dataclass(frozen=True)
class Step:
    """Medians of one side: seconds of a step and of its two large parts, lower bound of a step, memory."""

    name: str
    dtype: str
    seconds: float
    generation_s: float
    training_s: float
    limit_s: float
    peak_resident_bytes: int

    @property
    def limit_share(self) -> float:
        return self.limit_s / self.seconds


def main() -> None:
    parser = parser_of(__doc__, smoke={"repeats": 1, "dtypes": DTYPES[:1], "prompts_per_step": 2, "peak_sizes": (64,)})
    parser.set_defaults(dtypes=DTYPES, prompts_per_step=task.PROMPTS_PER_STEP, peak_sizes=PEAK_SIZES)
    parser.add_argument("--model", choices=("small", "135M"), default="small", help="the measured model")
    parser.add_argument(
        "--agreement", action="store_true", help="only compare the results of both sides, not their times"
    )
    args = parser.parse_args()
    if args.smoke and args.agreement:
        parser.error("--agreement needs TRL, which --smoke leaves out; give only one of them")
    is_large = args.model == "135M"
    if is_large:
        args.prompts_per_step = min(args.prompts_per_step, 8)
        args.dtypes = DTYPES[:1]  # four sides do not fit into 24 GiB
    systems = (OURS,) if args.smoke else (OURS, PEER)
    python_of(systems[-1], MAKE_TARGET)  # a missing environment is reported before the measurements
    threads = set_num_threads(args.threads or count_physical_cores())
    peaks = Peaks(args.peak_sizes)
    num_tokens = args.prompts_per_step * task.GROUP_SIZE * (task.PROMPT_LEN + task.NEW_TOKENS)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        recipe = directory / "recipe.toml"
        if is_large:
            write_model(directory / "model", "135M")
        vocabulary = MODELS["135M"]["vocab_size"] if is_large else None
        write_task(directory, threads, args.prompts_per_step, vocabulary=vocabulary)
        if args.agreement:
            return print_rows("grpo_step", rows_of(_compare(recipe, directory, threads)), smoke=False)

        def ask(side: Side, _: int) -> dict[str, Any]:
            """Run one step."""
            result = side.ask()
            if result["num_tokens"] != num_tokens:
                raise BenchmarkError(
                    f"a step of {side.name} had {result['num_tokens']} tokens instead of {num_tokens}: the steps are "
                    "not comparable; find out what changed its prompts or responses."
                )
            return result

        peaks.measure(args.dtypes)
        with ExitStack() as stack:
            sides = [
                stack.enter_context(
                    Side(
                        *(system, dtype),
                        task="grpo",
                        threads=threads,
                        directory=directory,
                        make_target=MAKE_TARGET,
                        path=str(directory / "model"),
                        prompts=str(directory / "prompts.json"),
                        recipe=str(recipe),
                        settings=trl_settings(load_config(recipe)),
                        sizes=task.SIZES | {"prompts_per_step": args.prompts_per_step},
                    )
                )
                for dtype in args.dtypes
                for system in systems
            ]
            print_sides(sides, threads)
            measurements = alternate(sides, ask, args.repeats, "grpo_step")
        peaks.measure(args.dtypes)
        flops = step_flops(directory / "model", args.prompts_per_step)
        steps = {
            (side.system, side.dtype): _medians(side, results, flops / peaks.flops_per_s[side.dtype])
            for side, results in measurements.items()
        }
        _print_steps(list(steps.values()), num_tokens)
        if args.smoke:
            ours = steps[OURS, args.dtypes[0]]
            return print_rows("grpo_step", [Row("step", "s", ours.seconds, None, ours.limit_s)], smoke=True)
        comparisons = [] if is_large else _compare(recipe, directory, threads)
    return print_rows("grpo_step", [*_rows(steps, num_tokens, args.dtypes), *rows_of(comparisons)], smoke=False)


def _compare(recipe: Path, directory: Path, threads: int) -> list[Comparison]:
    agreement = compare_with_trl(recipe, directory, threads, MAKE_TARGET)
    print_agreement(agreement)
    require_agreement(agreement.comparisons)
    require_noticed(agreement.planted)
    return agreement.comparisons


def step_flops(model: Path, prompts_per_step: int) -> float:
    """Return the FLOPs that generation and update of one step need."""
    shape = decoder_shape(model)
    assert shape is not None, "models.py writes models whose shape is known"
    new_tokens = [task.NEW_TOKENS] * (prompts_per_step * task.GROUP_SIZE)
    generation = generation_flops(shape, task.PROMPT_LEN, new_tokens, task.GROUP_SIZE)
    return generation + update_flops(shape, task.PROMPT_LEN, new_tokens, task.GROUP_SIZE)


def _medians(side: Side, results: list[dict[str, Any]], limit_s: float) -> Step:
    medians = {key: median(result[key] for result in results) for key in ("seconds", "generation_s", "training_s")}
    memory = max(result["peak_resident_bytes"] for result in results)
    return Step(side.name, side.dtype, **medians, limit_s=limit_s, peak_resident_bytes=memory)


def _rows(steps: dict[tuple[str, str], Step], num_tokens: int, dtypes: Sequence[str]) -> list[Row]:
    """Return the rows of our faster dtype against TRL's, then of the step dtype by dtype."""
    ours, peer = (
        min((steps[system, dtype] for dtype in dtypes), key=lambda step: step.seconds) for system in (OURS, PEER)
    )
    ratio = peer.seconds / ours.seconds
    rows = [
        Row("step", "s", ours.seconds, peer.seconds, ours.limit_s, ratio),
        Row(
            "tokens_per_s",
            "tokens/s",
            num_tokens / ours.seconds,
            num_tokens / peer.seconds,
            num_tokens / ours.limit_s,
            ratio,
        ),
        Row("generation_share", "1", ours.generation_s / ours.seconds, peer.generation_s / peer.seconds),
        Row("training_share", "1", ours.training_s / ours.seconds, peer.training_s / peer.seconds),
        Row("limit_share", "1", ours.limit_share, peer.limit_share, 1.0, ours.limit_share / peer.limit_share),
        Row(
            "peak_memory",
            "MiB",
            ours.peak_resident_bytes / MIB,
            peer.peak_resident_bytes / MIB,
            None,
            peer.peak_resident_bytes / ours.peak_resident_bytes,
        ),
    ]
    for dtype in dtypes:
        ours, peer = steps[OURS, dtype], steps[PEER, dtype]
        rows.append(Row(f"step_{dtype}", "s", ours.seconds, peer.seconds, ours.limit_s, peer.seconds / ours.seconds))
    return rows


def _print_steps(steps: list[Step], num_tokens: int) -> None:
    print_table(
        f"one GRPO step on {num_tokens:,} tokens; medians",
        ("side", "step s", "tokens/s", "generation", "training", "share of the limit", "peak memory MiB"),
        [
            (
                step.name,
                f"{step.seconds:.3f}",
                figure(num_tokens / step.seconds),
                f"{step.generation_s / step.seconds:.0%}",
                f"{step.training_s / step.seconds:.0%}",
                f"{step.limit_share:.1%}",
                figure(step.peak_resident_bytes / MIB),
            )
            for step in steps
        ],
    )


if __name__ == "__main__":
    run(main)
