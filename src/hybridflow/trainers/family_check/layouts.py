"""The lines of several ranks: a copy sharded over processes on gloo computes what one process computes.

`python -m hybridflow.trainers.family_check.layouts DIRECTORY RANK` is one of the ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import FileStore
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig
from hybridflow.engines import Outputs, TorchEngine, join_process_group
from hybridflow.errors import HybridFlowError
from hybridflow.protocol import DataProto
from hybridflow.trainers.family_check.copy import Values, write_copy
from hybridflow.trainers.family_check.lines import Comparison, Difference, difference

TIMEOUT_S = 300
JOB, ROWS, RESULT, STORE = "job.json", "rows", "result.safetensors", "store"
LOG_PROBS = "log_probs"


def layout_title(world_size: int, parallel: ParallelConfig) -> str:
    """Return the title of the line of a layout."""
    return f"{world_size} ranks{''.join(f', {name} {size}' for name, size in parallel if size > 1)} = one"


def layout_difference(config: PretrainedConfig, world_size: int, parallel: ParallelConfig, seed: int) -> Difference:
    """Compare a copy that `world_size` processes share with the same copy in this process."""
    with tempfile.TemporaryDirectory(prefix="hybridflow-check-") as name:
        directory = Path(name)
        copy = write_copy(config, directory, seed)
        weighted = copy.rows.union(DataProto.from_dict({"weights": copy.weights}))
        weighted.save_to_disk(directory / ROWS)
        job = {"world_size": world_size, "parallel": dict(parallel)}
        (directory / JOB).write_text(json.dumps(job))
        errors = _run_ranks(directory, world_size)
        if not (directory / RESULT).exists():
            return Difference(error=errors or "a rank ended without a result")
        found = load_file(directory / RESULT)
        return difference(Values(found.pop(LOG_PROBS), found), Comparison(copy).alone)


def _run_ranks(directory: Path, world_size: int) -> str:
    """Run the ranks; return the last line of the first one that fails."""
    command = [sys.executable, "-P", "-m", __name__, str(directory)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], env=environment, **streams) for rank in range(world_size)]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in ranks]
    except subprocess.TimeoutExpired:
        return f"the ranks did not end within {TIMEOUT_S} s"
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = [output for process, output in zip(ranks, outputs, strict=True) if process.returncode]
    return failed[0].strip().rpartition("\n")[2] if failed else ""


def compute(directory: Path, rank: int) -> None:
    """Compute this rank's rows, and write log-probs and gradients as the first rank."""
    job = json.loads((directory / JOB).read_text())
    store = FileStore(str(directory / STORE), job["world_size"])
    join_process_group(rank, job["world_size"], store, timeout_s=TIMEOUT_S)
    engine = TorchEngine(
        str(directory),
        "policy",
        model=ModelConfig(path=str(directory), dtype="float32"),
        memory=MemoryConfig(),
        optimizer=OptimizerConfig(lr=0.0),
        parallel=ParallelConfig(**job["parallel"]),
    )
    rows = DataProto.load_from_disk(directory / ROWS)
    place, count = engine.ranks.place("data"), engine.ranks.data
    mine = rows.select_idxs(torch.arange(place, len(rows), count))
    log_probs = torch.zeros(rows.batch["response_mask"].shape)
    for of_rank, found in enumerate(engine.gather(engine.forward(mine)["log_probs"])):
        log_probs[of_rank::count] = found
    engine.add_to_update(mine, _loss, number=0, is_last=True)
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in engine.parameters.items()}
    tensors = {n: each.full_tensor() if isinstance(each, DTensor) else each for n, each in gradients.items()}  # by all
    if rank == 0:
        tensors = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
        save_file({**tensors, LOG_PROBS: log_probs[rows.batch["response_mask"]]}, directory / RESULT)
    _leave(store, job["world_size"])


def _loss(outputs: Outputs, rows: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
    return (outputs["log_probs"] * rows.batch["weights"] * rows.batch["response_mask"]).sum(), {}


def _leave(store: FileStore, world_size: int) -> NoReturn:
    """End when all ranks have finished, without destroying groups of which others may close connections."""
    done = [f"done {rank}" for rank in range(world_size)]
    store.set(f"done {torch.distributed.get_rank()}", "")
    store.wait(done, timedelta(seconds=60))
    sys.stdout.flush()
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Compute as one rank, and print an error as one line."""
    torch.set_num_threads(1)
    try:
        compute(Path(arguments[0]), int(arguments[1]))
    except HybridFlowError as error:
        print(str(error).replace("\n", " "))
        sys.stdout.flush()
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
