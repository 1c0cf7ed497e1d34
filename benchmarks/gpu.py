"""One GPU: updates, generation, a GRPO step, and memory, of Qwen2.5 models of 0.5B and 1.5B with random weights.

Parts (of one model each: below 5 minutes on an H100 or H200):

mfu         MFU of an update in bfloat16, 4,096 tokens per sequence, 16,384 per micro-batch, as a share of a measured
            matrix product; peak memory beside the estimate of hybridflow.models.training_memory
generation  tokens per second of 256 sequences against `generate` of transformers, and the bound of memory bandwidth
step        seconds of a GRPO step of a Llama with the sizes of 0.5B against TRL's, if the environment of
            `make bench-grpo_step` is there

Each setting runs in its own process. A smoke run has a tiny model, and needs no GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from support.arguments import names_in, parser_of, positive
from support.environments import ENVIRONMENTS, ROOT
from support.errors import BenchmarkError
from support.gpu_measurements import generation, update
from support.gpu_models import MODELS, TINY, write_sized_model
from support.grpo_files import write_task
from support.program import run
from support.report import Row, figure, print_rows, print_table
from support.side import Side
from support.trl_settings import trl_settings

from hybridflow.config import load_config
from hybridflow.runtime.device import own_device
from hybridflow.runtime.threads import count_physical_cores

PARTS = ("mfu", "generation", "step")
GOALS = {"0.5B": 0.45, "1.5B": 0.5}
"""MFU of the setting `compiled` that this project aims at."""

STEP_GOAL = 2.0
"""Times as fast as TRL's GRPO step that this project aims at."""

SETTINGS: dict[str, dict[str, Any]] = {
    "compiled": {"compile": True},
    "eager": {"compile": False},
    "recomputed": {"compile": True, "gradient_checkpointing": True},
    "idle_offload": {"compile": True, "offload": "idle"},
    "host_offload": {"compile": True, "gradient_checkpointing": True, "offload": "host"},
}
SIZES = {
    "mfu": {"sequences": 8, "length": 4096, "prompt_len": 256, "micro_batch": 16384},
    "generation": {"sequences": 256, "prompt_len": 128, "new_tokens": 256},
    "step": {"prompts_per_step": 8, "group_size": 8, "prompt_len": 128, "new_tokens": 512, "accumulation": 8},
}
SMOKE_SIZES = {
    "mfu": {"sequences": 2, "length": 32, "prompt_len": 8, "micro_batch": 32},
    "generation": {"sequences": 4, "prompt_len": 8, "new_tokens": 4},
    "step": {"prompts_per_step": 2, "group_size": 2, "prompt_len": 8, "new_tokens": 4, "accumulation": 1},
}
SMOKE = {"repeats": 1, "models": ("0.5B",), "settings": ("eager", "recomputed")}
TIMEOUT_S = 420


def main() -> None:
    args = _arguments()
    if args.measure:
        print(json.dumps(_measure(**json.loads(args.measure))))
        return
    if not args.smoke and own_device().type != "cuda":
        raise BenchmarkError(
            "this benchmark needs a CUDA device, and torch finds none (see nvidia-smi); on a CPU, "
            "`make bench-gpu ARGS=--smoke` checks with a tiny model that it runs."
        )
    rows: list[Row] = []
    for part in args.part:
        rows += {"mfu": _mfu, "generation": _generation, "step": _step}[part](args)
    if not rows:
        raise BenchmarkError("every measurement failed; the errors are above.")
    print_rows("gpu", rows, smoke=args.smoke)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, 3, smoke=SMOKE)
    parser.add_argument(
        "--part", type=names_in(PARTS), default=PARTS, help=f"some of {', '.join(PARTS)}, with commas (default: all)"
    )
    parser.add_argument("--models", type=names_in(tuple(MODELS)), default=tuple(MODELS), help="0.5B, 1.5B or both")
    parser.add_argument(
        "--settings", type=names_in(tuple(SETTINGS)), default=tuple(SETTINGS), help=f"of mfu: {', '.join(SETTINGS)}"
    )
    parser.add_argument("--sequences", type=positive, metavar="N", help="sequences of mfu and generation")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def _mfu(args: argparse.Namespace) -> list[Row]:
    rows, lines = [], []
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            write_sized_model(Path(directory), name, tiny=args.smoke)
            for setting in args.settings:
                found = _in_process(args, "mfu", name, directory, setting=SETTINGS[setting])
                if found is None:
                    lines.append((name, setting, *["failed"] * 4))
                    continue
                goal = GOALS[name] if setting == "compiled" else None
                rows.append(Row(f"mfu_{name}_{setting}", "1", found["mfu"], None, goal, goal and found["mfu"] / goal))
                if found["peak_gib"]:
                    peak, estimate = found["peak_gib"], found["estimate_gib"]
                    rows.append(Row(f"peak_memory_{name}_{setting}", "GiB", peak, None, estimate, estimate / peak))
                figures = (found["tokens_per_s"], found["mfu"], found["peak_gib"], found["estimate_gib"])
                lines.append((name, setting, *map(figure, figures)))
    header = ("model", "setting", "tokens/s", "MFU", "peak GiB", "estimated GiB")
    print_table(f"updates on {own_device()}; limit: the goal of MFU, the estimate of memory", header, lines)
    return rows


def _generation(args: argparse.Namespace) -> list[Row]:
    rows, lines = [], []
    systems = ("hybridflow",) if args.smoke else ("hybridflow", "transformers")
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            write_sized_model(Path(directory), name, tiny=args.smoke)
            found = {system: _in_process(args, "generation", name, directory, system=system) for system in systems}
        for system, figures in found.items():
            values = ["failed"] * 3 if figures is None else [*map(figure, figures.values())]
            lines.append((name, system, *values))
        ours, peer = found["hybridflow"], found.get("transformers")
        if ours:
            theirs = peer["tokens_per_s"] if peer else None
            ratio = ours["tokens_per_s"] / theirs if theirs else ours["tokens_per_s"] / ours["bound"]
            rows.append(Row(f"generation_{name}", "tokens/s", ours["tokens_per_s"], theirs, ours["bound"], ratio))
    header = ("model", "side", "tokens/s", "bound of memory bandwidth", "peak GiB")
    print_table(f"generation on {own_device()}", header, lines)
    return rows


def _step(args: argparse.Namespace) -> list[Row]:
    sizes, threads = (SMOKE_SIZES if args.smoke else SIZES)["step"], args.threads or count_physical_cores()
    has_trl = not args.smoke and (ROOT / ENVIRONMENTS["trl"] / "bin/python").exists()
    medians = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "model").mkdir()
        write_sized_model(directory / "model", "0.5B", tiny=args.smoke, family="Llama")
        vocabulary = (TINY if args.smoke else MODELS["0.5B"])["vocab_size"]
        write_task(directory, threads, sizes["prompts_per_step"], vocabulary=vocabulary, sizes=sizes)
        recipe = directory / "recipe.toml"
        for system in ("hybridflow", "trl") if has_trl else ("hybridflow",):
            options = {
                "path": str(directory / "model"),
                "prompts": str(directory / "prompts.json"),
                "recipe": str(recipe),
                "settings": trl_settings(load_config(recipe)),
                "sizes": sizes,
            }
            with ExitStack() as stack:
                side = stack.enter_context(
                    Side(
                        *(system, "bfloat16"),
                        task="grpo",
                        threads=threads,
                        directory=directory,
                        make_target="bench-grpo_step",
                        **options,
                    )
                )
                side.ask()
                medians[system] = median(side.ask()["seconds"] for _ in range(args.repeats))
    if not has_trl and not args.smoke:
        print("\nTRL is not measured: .bench/trl does not exist; `make bench-grpo_step` creates it.")
    ours, peer = medians["hybridflow"], medians.get("trl")
    print(f"\na GRPO step on {own_device()}; goal: {STEP_GOAL:g} times as fast as TRL")
    return [Row("grpo_step_0.5B", "s", ours, peer, None, peer / ours if peer else None)]


def _in_process(
    args: argparse.Namespace, part: str, name: str, directory: str, **options: Any
) -> dict[str, Any] | None:
    """Return the figures of a measurement in a process of its own; None, with its error on stderr, if it failed.

    The figures are also written to stderr at once: the tables come at the end, which a limit of time may cut off.
    """
    sizes = dict((SMOKE_SIZES if args.smoke else SIZES)[part])
    if args.sequences:
        sizes["sequences"] = args.sequences
    measurement = {"part": part, "path": directory, "sizes": sizes, "repeats": args.repeats, **options}
    command = [sys.executable, sys.argv[0], "--measure", json.dumps(measurement | {"threads": args.threads})]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"{part} of {name}, {options} took more than {TIMEOUT_S} s and was stopped.", file=sys.stderr)
        return None
    if done.returncode:
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{part} of {name}, {options}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def _measure(part: str, path: str, threads: int | None, **options: Any) -> dict[str, float | None]:
    if threads:
        import torch

        torch.set_num_threads(threads)
    return {"mfu": update, "generation": generation}[part](Path(path), **options)


if __name__ == "__main__":
    run(main)
