"""Weights from a trainer to a rollout engine: every transport against one copy of the same bytes, on CPU.

transports
  colocated     the engine in the trainer's process: our part, which is gathering and two fingerprints
  object_store  two processes of a Ray cluster, through shared memory
  ipc           the same two processes, through pages that both map
  broadcast     the same two processes, through gloo
  disk          the same two processes, through files
  vllm          vLLM's reload of the weights in its process, and the probe after it

Every transport sends float32 and checks every tensor. With five repeats it takes about ten minutes.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from sides.weight_sync_rounds import BUCKET_BYTES, copy_once, our_part
from support.arguments import parser_of
from support.environments import python_of
from support.models import write_config
from support.program import run
from support.report import Row, figure, print_rows, print_table
from support.side import Side
from support.weight_workers import PeakMemory, Receiver, Sender, random_weights

from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, WorkerGroup
from hybridflow.controller.ray import RayBackend, RayResourcePool
from hybridflow.rollout.weight_sync.conductor import BetweenPools
from hybridflow.runtime.allocator import keep_freed_memory
from hybridflow.runtime.threads import count_physical_cores, set_num_threads

MODELS = ("small", "100M", "500M")
TRANSPORTS = ("object_store", "ipc", "broadcast", "disk")
MAKE_TARGET = "bench-weight_sync"


def main() -> None:
    parser = parser_of(__doc__, smoke={"repeats": 1, "only": "small", "transports": TRANSPORTS[:2]})
    parser.add_argument("--only", choices=MODELS, help="this model alone (default: all)")
    parser.set_defaults(transports=TRANSPORTS)
    args = parser.parse_args()
    if not args.smoke:
        python_of("hybridflow_vllm", MAKE_TARGET)  # a missing environment is reported before the measurements
    keep_freed_memory()
    threads = set_num_threads(args.threads or count_physical_cores())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        for model in [args.only] if args.only else MODELS:
            path = Path(directory) / model
            write_config(path, model)
            lines: list[tuple[str, ...]] = []
            rows += colocated(path, model, args.repeats, lines)
            rows += between_pools(path, model, args, threads, Path(directory), lines)
            if not args.smoke:
                rows += into_vllm(path, model, args.repeats, threads, Path(directory), lines)
            header = ("transport", "seconds, median", "GB/s", "copies", "extra memory, sender + receiver")
            print_table(f"{model}: {lines[0][0]} to send", header, lines[1:])
    print_rows("weight_sync", rows, smoke=args.smoke)


def colocated(path: Path, model: str, repeats: int, lines: list[tuple[str, ...]]) -> list[Row]:
    """Time the copy and our part, alternating in this process."""
    weights = random_weights(path)
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    num_bytes, peak = sum(tensor.nbytes for tensor in weights.values()), PeakMemory()
    copy_once(weights, copies), our_part(weights)
    copied, ours, extra = [], [], 0
    for _ in range(repeats):
        copied.append(copy_once(weights, copies))
        peak.start()
        ours.append(our_part(weights))
        extra = max(extra, peak.extra())
    lines.append((f"{num_bytes / 1e6:,.0f} MB",))
    lines.append(_line("one copy", median(copied), num_bytes, 1.0, "-"))
    lines.append(_line("colocated", median(ours), num_bytes, median(ours) / median(copied), _mb(extra)))
    return [_row("colocated", model, num_bytes, median(ours), median(copied))]


def between_pools(
    path: Path, model: str, args: argparse.Namespace, threads: int, directory: Path, lines: list[tuple[str, ...]]
) -> list[Row]:
    """Time each transport between two processes; the copy that it is compared with is made in this process."""
    weights = random_weights(path)
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    num_bytes, rows = sum(tensor.nbytes for tensor in weights.values()), []
    for transport in args.transports:
        config = load_config(
            None,
            [
                *(f"model.path={path}", f"trainer.run_dir={directory}/run", f"rollout.weight_sync={transport}"),
                *(f"controller.threads={threads}", f"rollout.sync_bucket_bytes={BUCKET_BYTES}"),
            ],
        )
        with RayBackend(num_cpus=4, object_store_bytes=4 * 2**30) as backend:
            sender, receiver = (
                WorkerGroup(RayResourcePool([1]), ClassWithInitArgs(cls, config=config), backend, cls.__name__)
                for cls in (Sender, Receiver)
            )
            sync = BetweenPools(sender, receiver)
            sync()
            seconds, copied, extra = [], [], (0, 0)
            for _ in range(args.repeats):
                copied.append(copy_once(weights, copies))
                seconds.append(_timed(sync))
                extra = tuple(map(max, extra, (sender.extra_memory()[0], receiver.extra_memory()[0])))
        taken_s = median(seconds)
        lines.append(
            _line(transport, taken_s, num_bytes, taken_s / median(copied), f"{_mb(extra[0])} + {_mb(extra[1])}")
        )
        rows.append(_row(transport, model, num_bytes, taken_s, median(copied)))
    return rows


def into_vllm(
    path: Path, model: str, repeats: int, threads: int, directory: Path, lines: list[tuple[str, ...]]
) -> list[Row]:
    """Time vLLM's reload and the probe in vLLM's environment, and the same copy there."""
    with Side(
        *("hybridflow_vllm", "float32"),
        task="weight_sync",
        threads=threads,
        directory=directory,
        make_target=MAKE_TARGET,
        path=str(path),
    ) as side:
        results = [side.ask(number=number) for number in range(repeats + 1)][1:]
    weights_bytes = sum(tensor.nbytes for tensor in random_weights(path).values())
    times = {key: median(result[key] for result in results) for key in ("seconds", "copy", "probe")}
    extra = max(result["extra"] for result in results)
    lines.append(_line("vllm's reload", times["seconds"], weights_bytes, times["seconds"] / times["copy"], _mb(extra)))
    lines.append(("vllm's probe", f"{times['probe']:.4f}", "-", f"{times['probe'] / times['copy']:.2f}", "-"))
    return [_row("vllm_reload", model, weights_bytes, times["seconds"], times["copy"])]


def _timed(call: BetweenPools) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _line(name: str, seconds: float, num_bytes: int, copies: float, extra: str) -> tuple[str, ...]:
    return (name, f"{seconds:.4f}", figure(num_bytes / seconds / 1e9), f"{copies:.2f}", extra)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _row(name: str, model: str, num_bytes: int, ours: float, copy: float) -> Row:
    full_name = name if model == "100M" else f"{name}_{model}"
    return Row(full_name, "GB/s", num_bytes / ours / 1e9, num_bytes / copy / 1e9, None, copy / ours)


if __name__ == "__main__":
    run(main)
