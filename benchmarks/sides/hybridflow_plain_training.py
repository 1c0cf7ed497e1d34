"""The same step in plain PyTorch on the stock model of transformers, without hybridflow.

Padded micro-batches, autocast, DistributedDataParallel. It runs in hybridflow's environment.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from sides.train_rows import PROMPT_LEN, Step, rows_of_rank, run


def build(options: dict[str, Any], rank: int, ranks: int) -> Step:
    model: Any = AutoModelForCausalLM.from_pretrained(options["path"], dtype=torch.float32, attn_implementation="sdpa")
    parallel = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    columns = rows_of_rank(options["rows"], options["vocabulary"], options["longest"], rank, ranks)
    count = int(columns["num_response_tokens"])
    micro_batches = _similar_lengths(columns["attention_mask"].sum(1), options["max_tokens"])
    in_bfloat16 = options["dtype"] == "bfloat16"

    def step() -> float:
        total = torch.zeros(())
        for number, rows in enumerate(micro_batches):
            width = int(columns["attention_mask"][rows].sum(1).max())
            ids, mask = columns["input_ids"][rows, :width], columns["attention_mask"][rows, :width]
            counted = columns["response_mask"][rows, : width - PROMPT_LEN]
            is_last = number == len(micro_batches) - 1
            with (
                nullcontext() if ranks == 1 or is_last else parallel.no_sync(),
                torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16),
            ):
                logits = parallel(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
                log_probs = logits[:, PROMPT_LEN - 1 : -1].float().log_softmax(-1)
                picked = log_probs.gather(-1, ids[:, PROMPT_LEN:, None]).squeeze(-1)
                loss = -(picked * columns["advantages"][rows, None] * counted).sum() * ranks / count
                loss.backward()
            total += loss.detach() / ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(total)
        return float(total)

    return step


def _similar_lengths(lengths: torch.Tensor, max_tokens: int) -> list[torch.Tensor]:
    """Group rows of similar length so that each group, padded, stays within the token budget."""
    parts: list[list[int]] = [[]]
    for row in lengths.argsort().tolist():
        if parts[-1] and (len(parts[-1]) + 1) * int(lengths[row]) > max_tokens:
            parts.append([])
        parts[-1].append(row)
    return [torch.tensor(part) for part in parts]


if __name__ == "__main__":
    run(build, transformers=transformers.__version__, torch=torch.__version__)
