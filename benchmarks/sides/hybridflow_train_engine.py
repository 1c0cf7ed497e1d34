"""hybridflow's side of `benchmarks/train_engine.py`: its training engine."""

from typing import Any

import torch

import hybridflow
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.models.kernels.library import use_kernels
from hybridflow.protocol import DataProto
from hybridflow.runtime.allocator import bound_shape_caches, keep_freed_memory
from sides.train_rows import Step, rows_of_rank, run


def build(options: dict[str, Any], rank: int, ranks: int) -> Step:
    keep_freed_memory()
    bound_shape_caches()
    use_kernels(not options["compile"])
    engine = TorchEngine(
        options["path"],
        "policy",
        model=ModelConfig(path=options["path"], dtype=options["dtype"], compile=options["compile"]),
        memory=MemoryConfig(max_tokens_per_micro_batch=options["max_tokens"], share_prompts=False),
        optimizer=OptimizerConfig(lr=1e-5, weight_decay=0.0),
    )
    columns = rows_of_rank(options["rows"], options["vocabulary"], options["longest"], rank, ranks)
    count = int(columns.pop("num_response_tokens"))
    columns.pop("num_tokens")
    rows = DataProto.from_dict(columns)

    def loss(outputs, part):
        weighted = outputs["log_probs"] * part.batch["advantages"][:, None] * part.batch["response_mask"]
        return -weighted.sum() / count, {}

    def step() -> float:
        return engine.ranks.sum_floats([engine.update(rows, loss).loss])[0]

    return step


if __name__ == "__main__":
    run(build, hybridflow=hybridflow.__version__, torch=torch.__version__)
