"""One of two ranks, of which the second one fails in several scenarios; `test_failures_of_ranks` starts it.

`failure_program.py RANK WORLD_SIZE STORE MODEL_DIR ROWS_DIR OUT_DIR`. Writes `OUT_DIR/<scenario>_<rank>.json` with the
raised error.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from fixtures import layout_program as layouts
from hybridflow.engines import TorchEngine, join_process_group
from hybridflow.protocol import DataProto


def main() -> None:
    rank, world_size = map(int, sys.argv[1:3])
    model, rows_path, out = sys.argv[4:7]
    torch.set_num_threads(1)
    join_process_group(rank, world_size, FileStore(sys.argv[3], world_size), timeout_s=3600)
    rows = DataProto.load_from_disk(rows_path)

    def build(**options: Any) -> TorchEngine:
        return layouts.build(layouts.Case(model, rows_path, **options))

    def attempt(scenario: str, call: Callable[[], Any], **more: Callable[[], Any]) -> None:
        raised, message = "", ""
        try:
            call()
        except Exception as error:
            raised, message = type(error).__name__, str(error)
        record = {"raised": raised, "message": message}
        record |= {name: value() for name, value in more.items()}
        Path(out, f"{scenario}_{rank}.json").write_text(json.dumps(record))

    engine = build()
    mine, loss = layouts.rows_of(engine, rows), layouts.loss_of("policy", rows)

    def update(part: DataProto, function: Any = loss) -> float:
        return engine.update(part, function, with_entropy=True, temperature=layouts.TEMPERATURE).grad_norm

    def weights() -> float:
        return float(sum(weight.sum() for _, weight in engine.weights()))

    before = weights()
    poisoned = mine.select(deepcopy=True)
    if rank == 1:
        poisoned.batch["advantages"][3, 0] = float("nan")
    attempt("nan_loss", lambda: update(poisoned), unchanged=lambda: weights() == before)

    def poison_gradient(outputs: Any, part: DataProto) -> Any:
        total, metrics = loss(outputs, part)
        if rank == 1 and 6 in part.batch["row_ids"].tolist():  # the square root's derivative at 0, times 0
            values = outputs["log_probs"]
            total = total + ((values - values.detach()) * 0.0).abs().sqrt().sum() * 0.0
        return total, metrics

    attempt("nan_gradient", lambda: update(mine, poison_gradient), unchanged=lambda: weights() == before)
    attempt("after", lambda: update(mine), norm=lambda: update(mine))

    longer = build(max_tokens=9)  # some rows of the second rank are longer
    attempt("too_long", lambda: longer.update(mine, loss, with_entropy=True))
    unknown = mine.select(deepcopy=True)
    if rank == 1:
        unknown.batch["input_ids"][3, -1] = 40
    attempt("unknown_token", lambda: update(unknown))
    attempt("mesh", lambda: build(tensor=2, sequence=2))

    def allocate_an_exbibyte(outputs: Any, part: DataProto) -> Any:
        torch.empty(1 << 60, dtype=torch.uint8)
        return loss(outputs, part)

    computed = []

    def record_and_compute(outputs: Any, part: DataProto) -> Any:
        computed.append(part)
        return loss(outputs, part)

    if rank == 1:
        attempt("out_of_memory", lambda: update(mine, allocate_an_exbibyte))
        attempt("after_out_of_memory", lambda: update(mine, record_and_compute), num_losses=lambda: len(computed))
        os._exit(7)
    attempt("death", lambda: update(mine))
    os._exit(0)  # with a dead peer, the process group's destructor aborts some processes (SIGABRT from a gloo thread)


if __name__ == "__main__":
    main()
