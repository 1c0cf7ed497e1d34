"""How many tokens fit in a micro-batch: two trials of different size, and the line through their peaks of memory."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engines.base import Outputs
from hybridflow.errors import ModelError
from hybridflow.protocol import DataProto
from hybridflow.runtime import memory_limit, peak_memory_of

if TYPE_CHECKING:
    from hybridflow.engines.torch_engine import TorchEngine

SEQUENCES_TRIED = (1, 2, 8)
"""Of the longest length, in one micro-batch; the first warms up."""

LARGEST, STEP = 131072, 256
"""More tokens than this make no matrix product faster; budgets are multiples of the second."""


def find_token_budget(engine: "TorchEngine", prompt_len: int, response_len: int, processes_on_node: int) -> int:
    """Do what `TrainEngine.find_token_budget` says, by trials with sequences of the longest lengths."""
    longest = prompt_len + response_len
    limit = memory_limit(engine.device, processes_on_node)
    sizes, peaks = [], []
    for count in SEQUENCES_TRIED:
        rows = _rows(count, prompt_len, response_len)
        sizes.append(count * longest)
        peaks.append(peak_memory_of(lambda rows=rows: _try(engine, rows), engine.device))
    per_token = (peaks[-1] - peaks[1]) / (sizes[-1] - sizes[1])
    base = peaks[1] - per_token * sizes[1]
    fits = LARGEST if per_token <= 0 else int((limit - base) / per_token)
    if not engine.ranks.is_alone:
        least = torch.tensor(fits)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        fits = int(least)
    if fits < longest:
        raise ModelError(
            f"one sequence of {longest} tokens takes {(base + per_token * longest) / 2**30:.1f} GiB of the "
            f"{limit / 2**30:.1f} GiB that a rank may use; set model.gradient_checkpointing = true, memory.offload for "
            "roles that can wait, more ranks, or shorter data.max_prompt_length and max_response_length."
        )
    return max(longest, min(fits, LARGEST) // STEP * STEP)


def _rows(count: int, prompt_len: int, response_len: int) -> DataProto:
    return DataProto.from_dict(
        {
            "input_ids": torch.zeros(count, prompt_len + response_len, dtype=torch.int64),
            "attention_mask": torch.ones(count, prompt_len + response_len, dtype=torch.int64),
            "response_mask": torch.ones(count, response_len, dtype=torch.bool),
        }
    )


def _try(engine: "TorchEngine", rows: DataProto) -> None:
    """What an update computes, up to its gradient; of an engine that does not learn, its outputs."""
    with_entropy = engine.head == "policy"
    if engine.optimizer_config is None:
        with torch.no_grad():
            engine._compute(engine._arrange(engine._part(rows, torch.arange(len(rows)))), False, 1.0)
        return

    def loss(outputs: Outputs, part: DataProto) -> tuple[Tensor, dict[str, float]]:
        return torch.stack([values.float().mean() for values in outputs.values()]).sum(), {}

    engine._learn(engine._part(rows, torch.arange(len(rows))), loss, with_entropy, 1.0)
    engine.optimizer.zero_grad(set_to_none=True)
