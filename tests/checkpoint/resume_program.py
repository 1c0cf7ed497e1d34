"""One rank of a process group that trains, saves and resumes; `test_sharded_state` starts it.

`resume_program.py RANK WORLD_SIZE PORT ACTIONS_JSON OUT_DIR`. An action has a `case` of layout_program.py,
a `name`, and a checkpoint directory as `load` or `save`. It trains two steps, saves if `save` is given, and trains two
more; rank 0 writes the weights to `OUT_DIR/<name>.safetensors`.
"""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from hybridflow.engines import join_process_group
from hybridflow.protocol import DataProto
from hybridflow.workers.model_worker import ModelWorker

LAYOUTS = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[1] / "engines" / "layout_program.py"), run_name="layout_program")
)


class Holder(ModelWorker):
    """A worker with an existing engine."""

    component = "actor"

    def __init__(self, engine: Any) -> None:
        self.engine = engine


def run(action: dict[str, Any]) -> dict[str, torch.Tensor]:
    case = LAYOUTS.Case(name=action["name"], **action["case"])
    engine, rows = LAYOUTS.build(case), DataProto.load_from_disk(case.rows)
    worker, loss = Holder(engine), LAYOUTS.loss_of(case.head, rows)

    def train() -> None:
        engine.update(LAYOUTS.rows_of(engine, rows), loss, with_entropy=True, temperature=LAYOUTS.TEMPERATURE)

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
    rank, world_size, port = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    join_process_group(rank, world_size, "127.0.0.1", port, timeout_s=120)
    for action in json.loads(Path(sys.argv[4]).read_text()):
        weights = run(action)
        if rank == 0:
            save_file(weights, Path(sys.argv[5]) / f"{action['name']}.safetensors")
    if world_size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
