"""One rank of an engine that yields slices of its weights; started by `test_resharding`.

Usage: `resharding_program.py RANK WORLD_SIZE STORE MODEL OUTPUT`. Each rank writes to `OUTPUT/<rank>.json`, by layout
and by planted bug, the names of weights with wrong elements, the bytes received, and the error.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from hybridflow.config import LoRAConfig, MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig
from hybridflow.engines import TorchEngine, join_process_group, resharding
from hybridflow.errors import WeightSyncError
from hybridflow.runtime.boxes import Box, part_of, whole_box
from hybridflow.runtime.partial_tensor import PartialTensor

BY_ROWS, BY_COLUMNS = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


def boxes_of(shapes: dict[str, torch.Size], rank: int, tensor: int) -> dict[str, Box]:
    """Return slices for engines of `tensor` ranks: matrices by rows or columns, vectors and others whole."""
    boxes = {}
    for name, shape in shapes.items():
        dim = 1 if "down_proj" in name or "o_proj" in name else 0
        if len(shape) == 2 and "k_proj" not in name:
            step = -(-shape[dim] // tensor)
            first = min(rank % tensor * step, shape[dim])
            box = list(whole_box(shape))
            box[dim] = (first, min(first + step, shape[dim]))
            boxes[name] = tuple(box)
    return boxes


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    join_process_group(rank, world_size, FileStore(sys.argv[3], world_size), timeout_s=240)
    path, output = sys.argv[4], Path(sys.argv[5])

    def build(dtype: Any = "float32", tensor: int = 1, offload: Any = None, lora: int = 0) -> TorchEngine:
        return TorchEngine(
            path,
            "policy",
            model=ModelConfig(path=path, dtype=dtype),
            memory=MemoryConfig(),
            optimizer=OptimizerConfig(),
            parallel=ParallelConfig(tensor=tensor),
            offload=offload,
            lora=LoRAConfig(rank=lora, alpha=4.0),
        )

    def collect(engine: TorchEngine, boxes: dict[str, Box]) -> dict[str, Any]:
        whole = {name: weight.clone() for name, weight in engine.weights()}
        result: dict[str, Any] = {"whole": engine.bytes_received, "wrong": [], "sliced names": []}
        try:
            for name, weight in engine.weights(boxes):
                expected = whole[name]
                if isinstance(weight, PartialTensor):
                    result["sliced names"].append(name)
                    expected, weight = part_of(expected, whole_box(expected.shape), boxes[name]), weight.contents
                if weight.dtype != expected.dtype or not torch.equal(expected, weight):
                    result["wrong"].append(name)
            result["sliced"] = engine.bytes_received
        except WeightSyncError as error:
            result["error"] = str(error)
        return result

    engine = build()
    shapes, results = engine.weight_shapes(), {}
    for size in (2, 4):
        results[f"data 4, {size}"] = collect(engine, boxes_of(shapes, rank, size))
    results["bfloat16"] = collect(build("bfloat16"), boxes_of(shapes, rank, 2))
    results["tensor 2"] = collect(build(tensor=2), boxes_of(shapes, rank, 2))
    results["tensor 2, engine 4"] = collect(build(tensor=2), boxes_of(shapes, rank, 4))
    results["tensor 4"] = collect(build(tensor=4), boxes_of(shapes, rank, 2))
    results["host"] = collect(build(offload="host"), boxes_of(shapes, rank, 2))
    results["adapters"] = collect(build(lora=2), boxes_of(shapes, rank, 2))
    boxes = boxes_of(shapes, rank, 2)
    results["whole on one rank"] = collect(engine, boxes if rank else {n: b for n, b in boxes.items() if n != BY_ROWS})
    results["overlap"] = collect(engine, boxes | {BY_ROWS: ((0, 30), (0, 32))})

    results["gap"] = collect(engine, boxes | {BY_ROWS: ((13, 39), (0, 32)) if rank % 2 else ((0, 26), (0, 32))})

    send = dist.all_to_all_single

    def planted(change: Any) -> dict[str, Any]:
        def changed(received: Tensor, *args: Any) -> None:
            send(received, *args)
            if rank == 1 and len(received) == 26 * 128:  # rows of gate_proj and up_proj
                change(received)

        resharding.dist.all_to_all_single = changed
        try:
            return collect(engine, boxes)
        finally:
            resharding.dist.all_to_all_single = send

    def flip(received: Tensor) -> None:
        received[77] ^= 4

    results["bit"] = planted(flip)
    results["rows"] = planted(lambda received: received.copy_(received.view(-1, 128).roll(1, 0).view(-1)))
    (output / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()


main()
