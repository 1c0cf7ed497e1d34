"""What a snapshot of a large model costs: bytes, seconds, and how often one fits into 3% of a step of 60 s.

Two ranks hold weights and two moments in float32, sharded over them, as FSDP2 does. Each copies its shards and writes
the copy to shared memory in a thread, as a training worker does, while its main thread multiplies matrices with one
CPU thread in place of a training step. The time that a snapshot takes from training is that of the copy, and the time
that the products lose while it is written.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from support.arguments import parser_of, positive
from support.program import run
from support.report import Row, print_rows
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import spawn

from hybridflow.checkpoint import BackgroundSave, StateCopy, save_sharded_state, saved_files

RANKS = 2
WIDTH = 1024
STEP_S, SHARE = 60.0, 0.03


def main() -> None:
    parser = parser_of(__doc__, None, smoke={"millions": 4, "rounds": 1})
    parser.add_argument("--millions", type=positive, default=500, metavar="N", help="parameters (default: 500 million)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="snapshots to measure (default: 3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        results = get_context("spawn").SimpleQueue()
        spawn(measure, (args.millions * 10**6, args.rounds, folder, shared, results), nprocs=RANKS)
        of_ranks = [results.get() for _ in range(RANKS)]
    worst = {name: max(each[name] for each in of_ranks) for name in of_ranks[0]}
    lost_s = worst["copy"] + worst["lost"]
    rows = [
        Row("state", "MB", sum(each["bytes"] for each in of_ranks) / 1e6),
        Row("copy", "s", worst["copy"]),
        Row("write", "s", worst["write"]),
        Row("lost_training", "s", lost_s),
        Row("steps_between_snapshots", "count", max(1, -(-lost_s // (SHARE * STEP_S)))),
    ]
    print_rows("snapshot_size", rows, smoke=args.smoke)


def measure(rank: int, parameters: int, rounds: int, folder: str, shared: str, results: Any) -> None:
    """Measure as one of the ranks; put medians of seconds and the bytes of this rank into `results`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    state, copy = state_of(parameters), StateCopy()
    directory = Path(shared)
    copy(state)  # allocates the memory that the next copies use again
    alone = products_per_s(lambda: True, least_s=2.0)[0]
    rows = []
    for number in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        copied, path = copy(state), directory / str(number)
        path.mkdir(exist_ok=True)
        copy_s = time.perf_counter() - start
        is_written = Event()
        save = BackgroundSave(partial(write, copied, path, is_written))
        rate, write_s = products_per_s(is_written.is_set)
        save.finish()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
        rows.append({"copy": copy_s, "write": write_s, "lost": max(0.0, write_s * (1 - rate / alone))})
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    shards = [tensor.to_local() for tree in state.values() for tensor in tree.values()]
    results.put(medians | {"bytes": sum(shard.nbytes for shard in shards)})
    dist.destroy_process_group()


def write(state: Any, directory: Path, is_written: Event) -> None:
    """Write the shards of this rank."""
    try:
        saved_files(directory, save_sharded_state(state, directory / "actor"))
    finally:
        is_written.set()


def state_of(parameters: int) -> dict[str, dict[str, DTensor]]:
    """Return weights and moments of square matrices, sharded by rows."""
    mesh = init_device_mesh("cpu", (RANKS,))
    names = [str(index) for index in range(max(1, parameters // WIDTH**2))]

    def tree() -> dict[str, DTensor]:
        return {name: DTensor.from_local(torch.rand(WIDTH // RANKS, WIDTH), mesh, [Shard(0)]) for name in names}

    return {"model": tree(), "exp_avg": tree(), "exp_avg_sq": tree()}


def products_per_s(is_done: Callable[[], bool], least_s: float = 0.0) -> tuple[float, float]:
    """Multiply matrices until `is_done()`; return the number of products in a second, and the seconds."""
    one, count, start = torch.rand(256, 256), 0, time.perf_counter()
    while not is_done() or time.perf_counter() - start < least_s:
        torch.mm(one, one)
        count += 1
    seconds = time.perf_counter() - start
    return count / seconds, seconds


if __name__ == "__main__":
    run(main)
