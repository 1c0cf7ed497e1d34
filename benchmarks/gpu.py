"""One GPU, in a quarter of an hour: what generation and updates reach of the bounds of the machine.

Parts, in this order, each in processes of its own with a limit of time; `--help` lists the options:

probe       versions, bandwidth, peak of a product, and whether gloo takes tensors of the device
decode      the fixed cost of a generation and its steady step, of 0.5B, 1.5B and 7B, against the bound of bandwidth
shapes      a generation of log-normal lengths: tokens per second, shapes of steps, captures of CUDA graphs
kernels     bytes per second of decoding attention, by rows and lengths
variants    the steady step without CUDA graphs, sampled by PyTorch, and without Triton
attention   TFLOP/s of training attention, forward and backward, by backend
nccl        an NCCL group of one rank on a store in Python
mfu         MFU of updates by setting, as a share of the measured product and of 989 TFLOP/s; memory and its estimate
lora        the same of 7B with adapters (needs peft)
top_p       the steady step with top-p
ranks       the tests with two ranks on one GPU
tests       the other GPU tests of packages that differ from a commit (`--since`), or all
generation  tokens per second against `generate` of transformers
step        seconds of a GRPO step against TRL's, if the environment of `make bench-grpo_step` is there

Models have the sizes of Qwen2.5 and random weights. Each figure is a line of figures.jsonl as soon as it is known.
A call with `--budget 460` starts no process after that many seconds. `--after figures.jsonl` continues it: what ended
well there is not run again; with `--budget 1` it only writes the tables. A smoke run has a tiny model and needs no GPU.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from gpu_session.models import MODELS
from gpu_session.plan import PARTS, cases
from gpu_session.record import Record, done_cases, read_lines
from gpu_session.runner import run_cases, start_method
from gpu_session.summary import rows_of, tables_of
from support.arguments import names_in, parser_of, positive
from support.errors import BenchmarkError
from support.program import run
from support.report import print_rows

SMOKE = {"models": ("0.5B",)}


def main() -> None:
    args = _arguments()
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
        torch.set_num_threads(args.threads)
    earlier = read_lines(args.after) if args.after and args.after.is_file() else []
    if args.after and not earlier:
        raise BenchmarkError(
            f"--after {args.after} is not a file of figures; give the figures.jsonl of an earlier call."
        )
    start_by = "fork" if args.smoke else start_method()
    if start_by is None:
        raise BenchmarkError(
            "this benchmark needs a CUDA device, and torch finds none (see nvidia-smi); on a CPU, "
            "`make bench-gpu ARGS=--smoke` checks with a tiny model that it runs."
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the process that measures
    given = args.out or os.environ.get("OUT")
    with tempfile.TemporaryDirectory() as root:
        out = Path(given or (root if args.smoke else tempfile.mkdtemp(prefix="hybridflow-gpu-")))
        record = Record(out / "figures.jsonl")
        planned = cases(args.part, args.models, tiny=args.smoke, root=root, out=out, since=args.since)
        left = [case for case in planned if case.key not in done_cases(earlier)]
        run_cases(left, record, budget_s=args.budget or float("inf"), start_by=start_by)
        lines = earlier + read_lines(record.path)
        print(summary := tables_of(lines, [case.key for case in planned]))
        (out / "summary.md").write_text(summary + "\n")
        if given or not args.smoke:
            print(f"\nfigures.jsonl and summary.md are in {out}")
    rows = rows_of(lines)
    if not rows and not done_cases(lines):
        raise BenchmarkError("no measurement ended well; the table above says how each ended.")
    print_rows("gpu", rows, smoke=args.smoke)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, None, smoke=SMOKE)
    parser.add_argument(
        "--part", type=names_in(PARTS), default=PARTS, help=f"some of {', '.join(PARTS)}, with commas (default: all)"
    )
    parser.add_argument(
        "--models", type=names_in(list(MODELS)), default=tuple(MODELS), help="0.5B, 1.5B, 7B or several"
    )
    parser.add_argument("--budget", type=positive, metavar="S", help="seconds of the whole call (default: no limit)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for the figures (default: $OUT, or a new folder)")
    parser.add_argument("--after", type=Path, metavar="FILE", help="the figures.jsonl of an earlier call to continue")
    parser.add_argument("--since", default="", metavar="COMMIT", help="run the tests of packages that differ from it")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
