"""A training step: hybridflow's engine against plain PyTorch on the stock model of transformers, on CPU, 1 and 2 ranks.

A random Llama; prompts of 32 tokens, long-tailed responses; a policy-gradient loss, one optimizer step on all rows, the
same token budget per micro-batch. Plain: padded micro-batches of similar lengths, torch.autocast, fused AdamW,
DistributedDataParallel on 2 ranks. Ours: packed, on 2 ranks sharded by FSDP2. The benchmark fails unless the losses of
the first measured step agree. The ranks of a side share the machine's cores. Takes a few minutes; plain PyTorch runs in
hybridflow's environment, so that a smoke run has both sides, on 2 ranks.
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from sides.train_rows import rows_of_rank
from support.arguments import parser_of
from support.errors import BenchmarkError
from support.models import MAX_POSITIONS, MODELS, write_model
from support.program import run
from support.report import Row, figure, print_rows, print_sides, print_table
from support.rounds import alternate
from support.side import Side

from hybridflow.runtime.threads import count_physical_cores, set_num_threads

MAKE_TARGET = "bench-train_engine"
MIB = 2**20
ROWS = {"small": 512, "100M": 48}
TINY = {"repeats": 1, "threads": 2, "ranks": (2,), "num_rows": 8, "longest": 64, "dtype": "float32"}
MAX_TOKENS = {"small": 16384, "100M": 4096}
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative tolerance of the loss of the first measured step."""


def main() -> None:
    args = arguments()
    threads = set_num_threads(args.threads or count_physical_cores())
    rows: list[Row] = []
    lines: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        write_model(path, args.model)
        vocabulary = MODELS[args.model]["vocab_size"]
        num_rows = args.num_rows or ROWS[args.model]
        options = {"path": str(path), "rows": num_rows, "vocabulary": vocabulary}
        options |= {"longest": args.longest, "max_tokens": MAX_TOKENS[args.model]}
        num_tokens = int(rows_of_rank(num_rows, vocabulary, args.longest, 0, 1)["num_tokens"])
        for ranks in args.ranks:
            with ExitStack() as stack:
                variants = {
                    "hybridflow": {"task": "train_engine", "compile": False},
                    "plain": {"task": "plain_training"},
                }
                if args.compile:
                    variants["hybridflow compiled"] = {"task": "train_engine", "compile": True}
                sides = {}
                for name, variant in variants.items():
                    folder = Path(directory) / f"{name} {ranks}"
                    folder.mkdir()
                    common = {"threads": threads, "directory": folder, "make_target": MAKE_TARGET, "ranks": ranks}
                    sides[name] = stack.enter_context(Side("hybridflow", args.dtype, **common, **options, **variant))
                    sides[name].name = f"{name}, {ranks} ranks"
                if ranks == args.ranks[0]:
                    print_sides(list(sides.values()), threads)
                results = alternate(list(sides.values()), lambda side, _: side.ask(), args.repeats, f"{ranks} ranks")
            speeds, peaks = {}, {}
            for name, side in sides.items():
                speeds[name] = num_tokens / median(result["seconds"] for result in results[side])
                peaks[name] = max(max(result["peaks"]) for result in results[side])
                lines.append((f"{name}, {ranks} ranks", figure(speeds[name]), f"{peaks[name] / MIB:,.0f}"))
            require_same_loss(args.dtype, *(results[sides[name]][0]["loss"] for name in ("hybridflow", "plain")))
            rows.append(ratio_row(f"tokens_per_s_{ranks}", "1/s", speeds["hybridflow"], speeds["plain"]))
            if args.compile:
                ours = speeds["hybridflow compiled"]
                rows.append(ratio_row(f"tokens_per_s_compiled_{ranks}", "1/s", ours, speeds["plain"]))
            memory = (peaks["hybridflow"] / MIB, peaks["plain"] / MIB)
            rows.append(Row(f"peak_memory_{ranks}", "MiB", *memory, ratio=memory[1] / memory[0]))
    print_table(
        f"{args.model}, {args.dtype}: {num_tokens:,} tokens a step", ("", "tokens/s", "peak MiB per rank"), lines
    )
    print_rows("train_engine", rows, smoke=args.smoke)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, smoke=TINY)
    parser.add_argument("--model", choices=tuple(ROWS), default="small", help="which random Llama (default: small)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--compile", action="store_true", help="hybridflow with model.compile as well")
    parser.set_defaults(ranks=(1, 2), num_rows=0, longest=MAX_POSITIONS)
    return parser.parse_args()


def ratio_row(name: str, unit: str, ours: float, peer: float) -> Row:
    """Build a row in which more is better."""
    return Row(name, unit, ours, peer, ratio=ours / peer)


def require_same_loss(dtype: str, ours: float, plain: float) -> None:
    """Raise BenchmarkError if the two sides compute different losses."""
    if not abs(ours - plain) <= LOSS_TOLERANCE[dtype] * abs(plain):
        raise BenchmarkError(
            f"the losses differ: hybridflow {ours:.6g}, plain PyTorch {plain:.6g}; one of the sides is wrong."
        )


if __name__ == "__main__":
    run(main)
