"""The token budget of a micro-batch, by linear extrapolation of the peak memory of two trials of different size."""

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engines.base import Outputs
from hybridflow.engines.learner import Learner
from hybridflow.engines.row_forward import RowForward
from hybridflow.errors import ModelError
from hybridflow.protocol import DataProto
from hybridflow.runtime.boxes import local
from hybridflow.runtime.memory import describe_memory, memory_limit, naming_out_of_memory, peak_memory_of

SEQUENCES_TRIED = (1, 2, 8)
"""Numbers of sequences, of the longest length, in the trial micro-batches; the first trial is a warm-up."""

WITHOUT_TRIALS = (
    "set memory.max_tokens_per_micro_batch to a number of fewer tokens, model.gradient_checkpointing = true, or "
    "memory.offload for roles that can wait"
)
"""Advice for a trial that runs out of memory."""

LARGEST, STEP = 131072, 256
"""The largest budget, since more tokens do not make matrix products faster; and the unit of budgets."""


def find_token_budget(
    forward: RowForward, learner: Learner | None, prompt_len: int, response_len: int, processes_on_node: int
) -> int:
    """Return the budget of `TrainEngine.find_token_budget`, by trials with sequences of the longest lengths.

    Trials count the tokens of a micro-batch, of which a sequence parallel rank has its part; the budget is of a rank.
    """
    longest = prompt_len + response_len
    limit = memory_limit(forward.device, processes_on_node)
    sizes, peaks = [], []
    for count in SEQUENCES_TRIED:
        rows = _rows(count, prompt_len, response_len)
        sizes.append(count * longest)
        trial = f"the trial of {count} sequences of {longest} tokens for the token budget"
        with naming_out_of_memory(trial, forward.device, WITHOUT_TRIALS):
            peaks.append(peak_memory_of(lambda rows=rows: _try(forward, learner, rows), forward.device))
    per_token = (peaks[-1] - peaks[1]) / (sizes[-1] - sizes[1])
    base = peaks[1] - per_token * sizes[1] + _missing_moments(learner)
    fits = LARGEST if per_token <= 0 else int((limit - base) / per_token)
    if not forward.ranks.is_alone:
        least = torch.tensor(fits)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        fits = int(least)
    if fits < longest:
        raise ModelError(
            f"one sequence of {longest} tokens needs {(base + per_token * longest) / 2**30:.1f} GiB, but a rank has "
            f"{limit / 2**30:.1f} GiB ({describe_memory(forward.device)}); set "
            "model.gradient_checkpointing = true, memory.offload for idle roles, more ranks, or shorter "
            "data.max_prompt_length and data.max_response_length."
        )
    ranks = forward.ranks.sequence
    return -(-max(longest, min(fits, LARGEST * ranks) // STEP * STEP) // ranks)


def _missing_moments(learner: Learner | None) -> int:
    """Return the bytes of Adam's two moments that the first optimizer step will allocate on this rank."""
    if learner is None:
        return 0
    parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
    missing = [local(p) for p in parameters if p not in learner.optimizer.state]
    return 2 * sum(tensor.numel() * tensor.element_size() for tensor in missing)


def _rows(count: int, prompt_len: int, response_len: int) -> DataProto:
    """Return rows whose neighbors differ in the prompt, so that no prompt is computed once for several rows."""
    input_ids = torch.zeros(count, prompt_len + response_len, dtype=torch.int64)
    input_ids[:, 0] = torch.arange(count) % 2
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": torch.ones(count, prompt_len + response_len, dtype=torch.int64),
            "response_mask": torch.ones(count, response_len, dtype=torch.bool),
        }
    )


def _try(forward: RowForward, learner: Learner | None, rows: DataProto) -> None:
    """Compute the gradient of an update, or the outputs without a learner."""
    if learner is None:
        with torch.no_grad():
            forward.compute(forward.arrange(rows))
        return

    def loss(outputs: Outputs, part: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.stack([values.float().mean() for values in outputs.values()]).sum(), {}

    with learner.reduction.of_no_last_micro_batch():
        for count in (1, len(rows)):  # the gradient of the first micro-batch is there while the second is computed
            learner.learn(rows.select_idxs(torch.arange(count)), loss, forward.head == "policy", 1.0)
    learner.optimizer.zero_grad(set_to_none=True)
