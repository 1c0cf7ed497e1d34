"""What a training engine is: a model that computes on rows and learns from them.

Workers know this Protocol only; sharding, precision and micro-batches are the engine's own affair.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Size, Tensor
from transformers import PreTrainedModel

from hybridflow.protocol import DataProto

Outputs = dict[str, Tensor]
"""Columns (rows, response_len): `log_probs` and `entropies` of a policy, `values` of a critic; of a policy also columns
(rows, response_len, k): `candidate_log_probs` at the tokens `candidate_ids` of the rows, if they carry some, and with
`top_k` the k most likely tokens (with `top_k_below` among the first so many entries of the vocabulary), `top_ids`, and
their `top_log_probs`."""

LossFunction = Callable[[Outputs, DataProto], tuple[Tensor, dict[str, float]]]
"""(outputs, rows) -> this part's share of the loss (a scalar), and metrics that add up over parts (or whose glossary
says that the largest counts).

Both are already divided by the global count, so parts only add up."""


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step: the summed loss and metrics, the gradient norm before clipping, the rate used.

    `num_tokens` counts the real tokens of the rows, `num_computed_tokens` what was computed for them: a shared prompt
    once, and `num_padding_tokens`.
    """

    loss: float
    grad_norm: float
    lr: float
    metrics: dict[str, float]
    num_tokens: int
    num_computed_tokens: int
    num_padding_tokens: int

    @property
    def padding_share(self) -> float:
        """The share of the computed tokens that was padding; 0 when packed."""
        return self.num_padding_tokens / max(self.num_computed_tokens, 1)

    @property
    def saved_share(self) -> float:
        """The share of the rows' tokens that was not computed, since a neighbour has the same prompt."""
        return 1 - (self.num_computed_tokens - self.num_padding_tokens) / self.num_tokens if self.num_tokens else 0.0


class TrainEngine(Protocol):
    """A model on one rank.

    `num_updates` counts the optimizer steps, and is the version of the weights. `max_tokens` is the number of tokens
    that a micro-batch may have.
    """

    num_updates: int
    max_tokens: int

    @property
    def vocabulary_size(self) -> int:
        """The entries of the model's vocabulary."""
        ...

    @property
    def num_positions(self) -> int | None:
        """The length of the longest sequence that the model can compute; None if it states no limit."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether the state is in shards: `state_dict` has those of this rank, and `load_shards` reads them."""
        ...

    @property
    def shares_weights(self) -> bool:
        """Whether generation can compute with the tensors that learn: `rollout_model` is then the model itself."""
        ...

    def forward(
        self,
        rows: DataProto,
        *,
        with_entropy: bool = False,
        with_sum_squared_probs: bool = False,
        top_k: int = 0,
        top_k_below: int | None = None,
        temperature: float = 1.0,
    ) -> Outputs:
        """Outputs of every row, in order, without gradients; zero behind the response mask.

        Reads input_ids, attention_mask and response_mask. A policy's are those of softmax(logits / temperature);
        temperature 0, which is greedy sampling, counts as 1.
        """
        ...

    def update(
        self, rows: DataProto, loss_function: LossFunction, *, with_entropy: bool = False, temperature: float = 1.0
    ) -> UpdateResult:
        """One optimizer step on `rows`, with `loss_function` called for each part of them.

        Raises NonFiniteError, with nothing applied, if the loss or the gradient is not finite.
        """
        ...

    def on_device(self) -> AbstractContextManager[None]:
        """Keep weights and optimizer state on the device in the context. Every method does so for itself; a context
        around several saves moving them (memory.offload)."""
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """Compute with the model that the adapters started from. Raises ModelError if there are none."""
        ...

    def find_token_budget(self, prompt_len: int, response_len: int, processes_on_node: int) -> int:
        """Return the tokens per micro-batch that the memory of the fullest rank bears; equal on all ranks, who all
        call it. Raises ModelError if not even one sequence of these lengths fits."""
        ...

    def all_reduce_sum(self, value: int) -> int:
        """The sum of `value` over the data-parallel ranks."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """A value of each data-parallel rank, in their order."""
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Parameter names and tensors in the compute dtype, each tied tensor once."""
        ...

    def weight_shapes(self) -> dict[str, Size]:
        """Names and shapes of what `weights` gives, in its order."""
        ...

    def rollout_model(self) -> PreTrainedModel:
        """Return a model to generate with: this one if `shares_weights`, otherwise one that `weights` are loaded
        into."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that reaches a number: parameters, optimizer, step."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken.

        Raises CheckpointError, with nothing loaded, if it is not of this model.
        """
        ...

    def load_shards(self, described: dict[str, Any], read_into: Callable[[dict[str, Any]], None]) -> None:
        """Continue as by `load_state_dict`, with each rank reading its shards.

        `described` is what was stored, without contents; `read_into` fills the tensors of such a state in place.
        """
        ...
