"""One GRPO step, generation + reward + one update: hybridflow's trainer against TRL's GRPOTrainer, on CPU.

A model of 3.4M parameters, 32 prompts of 6 tokens, 8 responses of exactly 32 tokens each, one optimizer step on all
256 samples, no KL term, the same learning rate and reward. Both sides compute in bfloat16 (weights stay float32) and
in float32; the better dtype of each counts. On the samples of TRL's first step, hybridflow's engine must find TRL's
loss, gradient norm and log-probs, or the benchmark fails.
"""

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from support import grpo_task as task
from support.agreement import compare_with_trl, print_comparisons, require_agreement, rows_of
from support.arguments import parser_of
from support.environments import python_of
from support.errors import BenchmarkError
from support.grpo_files import write_task
from support.limits import Peaks, generation_flops, update_flops
from support.report import Row, figure, print_rows, print_sides, print_table
from support.rounds import alternate
from support.side import Side

from hybridflow.config import load_config
from hybridflow.models import decoder_shape
from hybridflow.runtime import count_physical_cores, set_num_threads

PEER = "trl"
DTYPES = ("bfloat16", "float32")
MAKE_TARGET = "bench-grpo_step"
MIB = 2**20
NUM_TOKENS = task.PROMPTS_PER_STEP * task.GROUP_SIZE * (task.PROMPT_LEN + task.NEW_TOKENS)
"""Of prompts and responses in one step; a prompt counts once for each of its responses."""


@dataclass(frozen=True)
class Step:
    """Medians of one side: seconds of a step and of its two large parts, share of the peak, memory."""

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
    args = parser_of(__doc__).parse_args()
    python_of(PEER, MAKE_TARGET)  # what is missing is said before anything is measured
    threads = set_num_threads(count_physical_cores())
    peaks = Peaks()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_task(directory, threads)
        recorded = directory / "recorded.safetensors"

        def ask(side: Side, number: int) -> dict[str, Any]:
            """One step; the first of TRL's float32 side, from the weights as written, is recorded."""
            is_recorded = number == 0 and (side.system, side.dtype) == (PEER, "float32")
            result = side.ask(record=str(recorded)) if is_recorded else side.ask()
            if result["num_tokens"] != NUM_TOKENS:
                raise BenchmarkError(
                    f"a step of {side.name} handled {result['num_tokens']} tokens instead of {NUM_TOKENS}; the steps "
                    "do not compare."
                )
            return result

        peaks.measure(DTYPES)
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
                        recipe=str(directory / "recipe.toml"),
                    )
                )
                for dtype in DTYPES
                for system in ("hybridflow", PEER)
            ]
            print_sides(sides, threads)
            measurements = alternate(sides, ask, args.repeats, "grpo_step")
        peaks.measure(DTYPES)
        flops = step_flops(directory / "model")
        steps = {
            (side.system, side.dtype): _medians(side, results, flops / peaks.flops_per_s[side.dtype])
            for side, results in measurements.items()
        }
        comparisons = compare_with_trl(recorded, load_config(directory / "recipe.toml", ["model.dtype=float32"]))
    _print_steps(list(steps.values()))
    print_comparisons(comparisons)
    require_agreement(comparisons)
    print_rows("grpo_step", [*_rows(steps), *rows_of(comparisons)])


def step_flops(model: Path) -> float:
    """What generation and update of one step need."""
    shape = decoder_shape(model)
    assert shape is not None, "models.py writes models whose shape is known"
    new_tokens = [task.NEW_TOKENS] * (task.PROMPTS_PER_STEP * task.GROUP_SIZE)
    generation = generation_flops(shape, task.PROMPT_LEN, new_tokens, task.GROUP_SIZE)
    return generation + update_flops(shape, task.PROMPT_LEN, new_tokens, task.GROUP_SIZE)


def _medians(side: Side, results: list[dict[str, Any]], limit_s: float) -> Step:
    medians = {key: median(result[key] for result in results) for key in ("seconds", "generation_s", "training_s")}
    memory = max(result["peak_resident_bytes"] for result in results)
    return Step(side.name, side.dtype, **medians, limit_s=limit_s, peak_resident_bytes=memory)


def _rows(steps: dict[tuple[str, str], Step]) -> list[Row]:
    """Our best dtype against the peer's, then the step dtype by dtype."""
    ours, peer = (
        min((steps[system, dtype] for dtype in DTYPES), key=lambda step: step.seconds)
        for system in ("hybridflow", PEER)
    )
    ratio = peer.seconds / ours.seconds
    rows = [
        Row("step", "s", ours.seconds, peer.seconds, ours.limit_s, ratio),
        Row(
            "tokens_per_s",
            "tokens/s",
            NUM_TOKENS / ours.seconds,
            NUM_TOKENS / peer.seconds,
            NUM_TOKENS / ours.limit_s,
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
    for dtype in DTYPES:
        ours, peer = steps["hybridflow", dtype], steps[PEER, dtype]
        rows.append(Row(f"step_{dtype}", "s", ours.seconds, peer.seconds, ours.limit_s, peer.seconds / ours.seconds))
    return rows


def _print_steps(steps: list[Step]) -> None:
    print_table(
        f"one GRPO step on {NUM_TOKENS:,} tokens; medians",
        ("side", "step s", "tokens/s", "generation", "training", "of the matrix product's limit", "peak memory MiB"),
        [
            (
                step.name,
                f"{step.seconds:.3f}",
                figure(NUM_TOKENS / step.seconds),
                f"{step.generation_s / step.seconds:.0%}",
                f"{step.training_s / step.seconds:.0%}",
                f"{step.limit_share:.1%}",
                figure(step.peak_resident_bytes / MIB),
            )
            for step in steps
        ],
    )


if __name__ == "__main__":
    try:
        main()
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
