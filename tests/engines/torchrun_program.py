"""One rank under `torchrun`, in a process group that this program makes itself; `test_process_group` starts it.

`torchrun_program.py MODEL_DIR ROWS_DIR OUT_DIR`. Rank 0 writes `OUT_DIR/result.json` and `OUT_DIR/weights.safetensors`.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fixtures import layout_program
from fixtures.layout_program import Case, build, leave, train

ROWS_OF_RANKS = ((0, 3), (3, 10))


def main() -> None:
    model, rows, out = sys.argv[1:4]
    torch.set_num_threads(1)
    built_before = build(Case(model, rows))
    dist.init_process_group("gloo")
    layout_program.rows_of = lambda engine, rows: rows.slice(*ROWS_OF_RANKS[dist.get_rank()])
    numbers, weights = train(model=model, rows=rows)
    if dist.get_rank() == 0:
        save_file(weights, Path(out, "weights.safetensors"))
        result = {**numbers, "built_before_is_alone": built_before.ranks.is_alone}
        Path(out, "result.json").write_text(json.dumps(result))
    leave(dist.distributed_c10d._get_default_store(), dist.get_world_size())


if __name__ == "__main__":
    main()
