"""One rank of a process group that trains, saves and resumes; `test_sharded_state` starts it.

`resume_program.py RANK WORLD_SIZE STORE ACTIONS_JSON OUT_DIR`. An action has a `case` of layout_program.py,
a `name`, and a checkpoint directory as `load` or `save`. It trains two steps, saves if `save` is given, and trains two
more; rank 0 writes the weights to `OUT_DIR/<name>.safetensors`. A save `in_background` is finished at the end.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch._C._distributed_c10d import FileStore

from fixtures import layout_program as layouts
from hybridflow.engines import join_process_group
from hybridflow.protocol import DataProto
from hybridflow.workers.model_worker import ModelWorker


class Holder(ModelWorker):
    """A worker with an existing engine."""

    component = "actor"

    def __init__(self, engine: Any) -> None:
        self.engine = engine


def run(action: dict[str, Any]) -> dict[str, torch.Tensor]:
    case = layouts.Case(name=action["name"], **action["case"])
    engine, rows = layouts.build(case), DataProto.load_from_disk(case.rows)
    worker, loss = Holder(engine), layouts.loss_of(case.head, rows)

    def train() -> None:
        engine.update(layouts.rows_of(engine, rows), loss, with_entropy=True, temperature=layouts.TEMPERATURE)

    if "load" in action:
        worker.load(action["load"])
        assert engine.num_updates == 2
    else:
        train()
        train()
    if "save" in action:
        worker.save(action["save"], in_background=action.get("in_background", False))
    train()
    train()
    worker.finish_save()
    return {name: weight.detach().clone() for name, weight in engine.weights()}


def main() -> None:
    rank, world_size = map(int, sys.argv[1:3])
    torch.set_num_threads(1)
    join_process_group(rank, world_size, FileStore(sys.argv[3], world_size), timeout_s=120)
    for action in json.loads(Path(sys.argv[4]).read_text()):
        weights = run(action)
        if rank == 0:
            save_file(weights, Path(sys.argv[5]) / f"{action['name']}.safetensors")
    if world_size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
