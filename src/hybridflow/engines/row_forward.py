"""The forward pass of rows: how they become micro-batches and model inputs, and what the model computes of them."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hybridflow.algorithms import (
    candidate_log_probs_from_logits,
    log_probs_and_entropy_from_logits,
    log_probs_from_logits,
    sum_squared_probs_from_logits,
    top_log_probs_from_logits,
)
from hybridflow.config import MemoryConfig
from hybridflow.engines.base import Outputs
from hybridflow.engines.device_copy import to_device
from hybridflow.engines.micro_batches import agree_on_micro_batches, plan_micro_batches, spread_micro_batches
from hybridflow.engines.packing import ModelInput, idle_input, pack, pad, prompt_families, sequence_lengths
from hybridflow.engines.ranks import SEQUENCE, Ranks
from hybridflow.errors import BatchError
from hybridflow.models.attention_backend import AttentionCase, AttentionName, attention_for
from hybridflow.models.experts import ExpertLoad
from hybridflow.models.forward import Forward
from hybridflow.models.kernels.exact import exact_log_probs
from hybridflow.models.kernels.fused_log_probs import fused_log_probs
from hybridflow.models.model_sizes import decoder_shape, sequence_costs
from hybridflow.models.routes import ReplayedRoutes, Routers
from hybridflow.models.sequence_parallel import GatherTokens, UlyssesPlan
from hybridflow.models.support import describe_positions, has_angles_of_length, num_positions
from hybridflow.protocol import DataProto


@dataclass(frozen=True)
class SequenceShard:
    """A rank's shard: `input` of its model, and `mine`, the indices of the response tokens that it predicts."""

    whole: ModelInput
    input: ModelInput
    mine: Tensor
    group: dist.ProcessGroup

    def to_rows(self, values: Tensor) -> Tensor:
        """Gather values of the response tokens of all ranks to (rows, response_len), equal on all ranks."""
        return self.whole.to_rows(GatherTokens.apply(values, self.mine, len(self.whole.labels), self.group))

    def to(self, device: torch.device) -> "SequenceShard":
        """Return the shard with its tensors on the device; the host does not wait for the copies."""
        whole, mine = self.whole.to(device), to_device(self.mine, device)
        return replace(self, whole=whole, input=self.input.to(device), mine=mine)


def sequence_shard_of(whole: ModelInput, group: dist.ProcessGroup) -> SequenceShard:
    """Take the columns of this rank, after padding the tokens so that each rank has equally many."""
    size, rank = group.size(), group.rank()
    padding = -whole.input_ids.shape[1] % size
    width = (whole.input_ids.shape[1] + padding) // size
    columns = slice(rank * width, (rank + 1) * width)
    tokens = whole.input_ids.shape[1]
    row, column = whole.positions // tokens, whole.positions % tokens
    is_mine = column // width == rank
    is_real = torch.ones_like(whole.input_ids, dtype=torch.bool) if whole.is_real is None else whole.is_real
    mine = replace(
        whole,
        is_real=F.pad(is_real, (0, padding))[:, columns],
        input_ids=F.pad(whole.input_ids, (0, padding))[:, columns],
        position_ids=F.pad(whole.position_ids.expand(len(whole.input_ids), -1), (0, padding))[:, columns],
        plan=UlyssesPlan(whole.plan.with_filling(padding), group),  # pyright: ignore
        positions=(row * width + column - rank * width)[is_mine],
        labels=whole.labels[is_mine],
        candidates=None if whole.candidates is None else whole.candidates[is_mine],
        routes=None if whole.routes is None else F.pad(whole.routes, (0, 0, 0, 0, 0, padding), value=-1)[:, columns],
    )
    return SequenceShard(whole, mine, is_mine.nonzero().flatten(), group)


Head = Literal["policy", "value"]

DEFAULT_BUDGET = 16384
"""Tokens per micro-batch if the configuration is "auto" and no budget was determined: generation needs none."""


class RowForward:
    """The forward pass of a model on rows, as a policy or as a critic. It does not know whether the model learns.

    `fuses_log_probs`: log-probs are computed by a compiled kernel. `expert_load` counts passes with gradients.
    """

    def __init__(
        self,
        path: str,
        head: Head,
        model: PreTrainedModel,
        model_forward: Forward,
        *,
        memory: MemoryConfig,
        compute_dtype: torch.dtype,
        ranks: Ranks,
        device: torch.device,
        fuses_log_probs: bool,
    ) -> None:
        self.head: Head = head
        self.ranks, self.device, self.memory = ranks, device, memory
        budget = memory.max_tokens_per_micro_batch
        self.max_tokens = DEFAULT_BUDGET if budget == "auto" else budget
        self.shape = decoder_shape(path, has_lm_head=head == "policy")
        self._path, self._model, self._model_forward = path, model, model_forward
        self._compute_dtype, self._fuses_log_probs = compute_dtype, fuses_log_probs
        self.expert_load: ExpertLoad | None = None

    def micro_batches(self, rows: DataProto) -> list[Tensor]:
        """Return the row indices of each micro-batch; equally many on all ranks, empty if a rank has no more rows."""
        packing, budget = self.memory.packing, self.max_tokens * self.ranks.sequence
        lengths, families, shared = sequence_lengths(rows), None, None
        if packing and self.memory.share_prompts:
            families, shared = prompt_families(rows, attention=self._shared_attention())

        def plan() -> list[Tensor]:
            self._require_known_tokens(rows)
            return plan_micro_batches(lengths, budget, packing=packing, families=families, shared=shared)

        def spread(plan: list[Tensor], count: int) -> list[Tensor]:
            costs = sequence_costs(self.shape, lengths.tolist())
            sharing = {"families": families, "shared": shared}
            return spread_micro_batches(plan, count, lengths, costs, budget, packing=packing, **sharing)

        return agree_on_micro_batches(plan, spread, self.ranks)

    def _require_known_tokens(self, rows: DataProto) -> None:
        """Raise BatchError for tokens that the model has no embedding or no position of, and for other routes."""
        embedding: Any = self._model.get_input_embeddings()
        ids, entries = rows.batch["input_ids"], embedding.weight.shape[0]
        if ids.numel() and (int(ids.max()) >= entries or int(ids.min()) < 0):
            raise BatchError(
                f"'{self._path}' has a vocabulary of {entries} entries, but the rows have token ids from "
                f"{int(ids.min())} to {int(ids.max())}; the rows were made with a different tokenizer."
            )
        config, longest = self._model.config, int(sequence_lengths(rows).max()) if len(rows) else 0
        if has_angles_of_length(config) and longest > (num_positions(config) or longest):
            raise BatchError(
                f"a row has {longest} tokens, but '{self._path}' has {describe_positions(config)}; lower "
                "data.max_prompt_length or data.max_response_length."
            )
        if "routes" in rows.batch:
            Routers.of(self._model).require_valid(rows.batch["routes"])

    def arrange(self, rows: DataProto | None) -> ModelInput:
        """Return the model input of some rows, in host memory, where its shapes are known without waiting."""
        if rows is None:
            return idle_input(2 * self.ranks.sequence)
        if self.memory.packing:
            arranged = pack(rows, share_prompts=self.memory.share_prompts, attention=self._shared_attention())
        else:
            arranged = pad(rows)
        if "candidate_ids" not in rows.batch:
            return arranged
        return replace(arranged, candidates=rows.batch["candidate_ids"][arranged.response_mask].long())

    def _shared_attention(self) -> AttentionName:
        """Return the implementation of attention for shared prompts."""
        case = AttentionCase.of_model(self._model.config, self._compute_dtype, self.device)
        return attention_for(case, shares_prompts=True)

    def compute(
        self,
        inputs: ModelInput,
        *,
        with_entropy: bool = False,
        temperature: float = 1.0,
        with_sum_squared_probs: bool = False,
        top_k: int = 0,
        top_k_below: int | None = None,
    ) -> Outputs:
        """Compute the outputs of a model input, (rows, response_len) on the device; see `TrainEngine.forward`."""
        if self.ranks.sequence == 1:
            mine = inputs.to(self.device)
            to_rows = mine.to_rows
        else:
            shard = sequence_shard_of(inputs, self.ranks.group(SEQUENCE)).to(self.device)
            mine, to_rows = shard.input, shard.to_rows
        settings = {"temperature": temperature or 1.0, "shared": self._model_forward.vocabulary}

        def of_labels(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            """Return log-probs, and entropies if wanted."""
            kernel = exact_log_probs if self._model_forward.is_exact else fused_log_probs
            is_fused = self._fuses_log_probs and settings["shared"] is None and len(logits)
            if self._model_forward.is_exact or is_fused:
                results = kernel(logits, labels, temperature=temperature or 1.0, with_entropy=with_entropy)
                return tuple(result for result in results if result is not None)
            if with_entropy:
                return log_probs_and_entropy_from_logits(logits, labels, **settings)
            return (log_probs_from_logits(logits, labels, **settings),)

        def read(logits: Tensor, which: slice) -> Sequence[Tensor]:
            if self.head == "value":
                return (logits.flatten().to(torch.promote_types(logits.dtype, torch.float32)),)
            labels = mine.labels[which]
            more = [sum_squared_probs_from_logits(logits, **settings)] if with_sum_squared_probs else []
            if mine.candidates is not None:
                more.append(candidate_log_probs_from_logits(logits, mine.candidates[which], **settings))
            if top_k:
                more += top_log_probs_from_logits(logits, top_k, below=top_k_below, **settings)
            return *of_labels(logits, labels), *more

        arguments = {"position_ids": mine.position_ids, "attention_plan": mine.plan}
        replayed = None if mine.routes is None else ReplayedRoutes(mine.routes.flatten(0, 1))
        replaying = Routers.of(self._model).using(replayed) if replayed else nullcontext()
        load = self.expert_load if torch.is_grad_enabled() else None
        with replaying, load.counting(mine.is_real) if load else nullcontext():
            results = self._model_forward.read_logits(mine.input_ids, mine.positions, read, **arguments)
        names = ["values"]
        if self.head == "policy":
            computed = {
                "log_probs": True,
                "entropies": with_entropy,
                "sum_squared_probs": with_sum_squared_probs,
                "candidate_log_probs": mine.candidates is not None,
                **dict.fromkeys(("top_ids", "top_log_probs"), top_k > 0),
            }  # in the order of the results of `read`
            names = [name for name, is_computed in computed.items() if is_computed]
        outputs = dict(zip(names, results, strict=True))
        if replayed:
            outputs["routes_changed"] = replayed.changed()[mine.positions]
        return {name: to_rows(result) for name, result in outputs.items()}
