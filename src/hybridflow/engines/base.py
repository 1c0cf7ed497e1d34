"""The `TrainEngine` Protocol: a model that computes outputs of rows and learns from them.

Workers depend on this Protocol only; sharding, precision and micro-batches are internal to the engine.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Size, Tensor
from transformers import PreTrainedModel

from hybridflow.protocol import DataProto
from hybridflow.runtime.boxes import Box

Outputs = dict[str, Tensor]
"""Columns (rows, response_len): `log_probs` and `entropies` of a policy, `values` of a critic.

With `routes` in the rows, which a policy replays, `routes_changed`: the share of layers with experts in which the token
that predicts it would have taken others.

A policy also has columns (rows, response_len, k): `candidate_log_probs` of the tokens in the column `candidate_ids`, if
the rows have it; with `top_k`, the k most likely tokens `top_ids` and their `top_log_probs` (`top_k_below` limits them
to smaller token ids)."""

LossFunction = Callable[[Outputs, DataProto], tuple[Tensor, Mapping[str, Tensor | float]]]
"""(outputs, rows of a micro-batch) -> the micro-batch's share of the loss (a scalar), and its metrics.

Both are already divided by the global count, so they are summed over micro-batches; metrics whose reduction is "max"
are combined by their maximum. Metrics are tensors of one number, which the engine reads once per update: a function
that reads a tensor itself makes the host wait for the device in every micro-batch."""


@dataclass(frozen=True)
class UpdateResult:
    """The result of one optimizer step: loss and metrics, gradient norm before clipping, learning rate.

    `num_tokens` counts the real tokens of the rows; `num_computed_tokens` counts computed tokens, including
    `num_padding_tokens`, with a shared prompt once. `experts`: figures of a mixture, see `ExpertLoad`.
    """

    loss: float
    grad_norm: float
    lr: float
    metrics: dict[str, float]
    num_tokens: int
    num_computed_tokens: int
    num_padding_tokens: int
    experts: dict[str, float] = field(default_factory=dict)

    @property
    def padding_share(self) -> float:
        """The share of padding in the computed tokens; 0 when packed."""
        return self.num_padding_tokens / max(self.num_computed_tokens, 1)

    @property
    def saved_share(self) -> float:
        """The share of the rows' tokens that was not computed, because another row shares the prompt."""
        return 1 - (self.num_computed_tokens - self.num_padding_tokens) / self.num_tokens if self.num_tokens else 0.0


class TrainEngine(Protocol):
    """A model on one rank.

    `num_updates` counts the optimizer steps, and is the version of the weights. `bytes_received` counts the bytes that
    other ranks sent to this one in the last call of `weights`.
    """

    num_updates: int
    bytes_received: int

    @property
    def max_tokens(self) -> int:
        """The token budget of a micro-batch."""
        ...

    @max_tokens.setter
    def max_tokens(self, max_tokens: int) -> None: ...

    @property
    def vocabulary_size(self) -> int:
        """The number of entries of the model's vocabulary."""
        ...

    @property
    def num_positions(self) -> int | None:
        """The length of the longest sequence that the model supports; None if its configuration has no limit."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether the state is sharded: `state_dict` has the shards of this rank, and `load_shards` reads them."""
        ...

    @property
    def shares_weights(self) -> bool:
        """Whether generation can use the trained tensors directly: `rollout_model` is then the model itself."""
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
        """Compute outputs of every row, in order, without gradients; zero where the response mask is off.

        Reads input_ids, attention_mask, response_mask, and routes if there are any. A policy's outputs are those of
        softmax(logits / temperature); temperature 0, which is greedy sampling, is treated as 1.
        """
        ...

    def update(
        self, rows: DataProto, loss_function: LossFunction, *, with_entropy: bool = False, temperature: float = 1.0
    ) -> UpdateResult:
        """Make one optimizer step on `rows`; `loss_function` is called for each micro-batch.

        Raises NonFiniteError, with nothing applied, if the loss or the gradient is not finite.
        """
        ...

    def add_to_update(
        self,
        rows: DataProto,
        loss_function: LossFunction,
        *,
        number: int,
        is_last: bool,
        with_entropy: bool = False,
        temperature: float = 1.0,
    ) -> None:
        """Add the gradients of part `number` (0 first) of an optimizer step, which `finish_update` makes.

        `forward` may be called between parts. The shares of the loss need not be divided by the global count, but by a
        number that is the same for all parts. After an error, and by part 0, added gradients are dropped. Raises
        BatchError if an earlier part is missing.
        """
        ...

    def finish_update(self, num_parts: int, scale: float) -> UpdateResult:
        """Make the optimizer step of the `num_parts` parts that were added, with loss and gradients times `scale`.

        Metrics of the result are not scaled. Raises BatchError if a part is missing, and the errors of `update`.
        """
        ...

    def on_device(self, *, with_optimizer: bool = True) -> AbstractContextManager[None]:
        """Keep the weights on the device inside the context, and the optimizer state if `with_optimizer`.

        Every method does so by itself; a context around several calls avoids moving them each time (memory.offload).
        Without the optimizer state, nothing that the engine trains may be changed inside the context. Raises
        ModelError, with everything on the host, if the device has too little memory.
        """
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """Compute with the base model inside the context. Raises ModelError if the engine has no adapters."""
        ...

    def find_token_budget(self, prompt_len: int, response_len: int, processes_on_node: int) -> int:
        """Return the number of tokens per micro-batch that fits into the memory of every rank; all ranks call it.

        Raises ModelError if not even one sequence of these lengths fits.
        """
        ...

    def all_reduce_sum(self, value: int) -> int:
        """Return the sum of `value` over the data-parallel ranks."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all data-parallel ranks, in rank order."""
        ...

    def weights(self, boxes: Mapping[str, Box] | None = None, at_once: int = 2**28) -> Iterable[tuple[str, Tensor]]:
        """Yield parameter names and whole tensors in the compute dtype, each tied tensor once.

        Adapters are merged into the weights; an engine that does not merge them yields A, and B times alpha / rank.

        For a weight with a box in `boxes`, on a sharded engine, a PartialTensor with this box, or the tensor if the box
        is all of it. Only these elements are sent to this rank, those of several weights together, up to `at_once`
        bytes. All ranks give boxes for the same weights, each its own, maybe an empty one; otherwise the weight is
        whole, and so are slices with adapters. Raises WeightSyncError before the last tensor if checksums of shards and
        boxes differ.

        A tensor may be the engine's own. With memory.offload = "idle" it is one only inside `with on_device():`.
        """
        ...

    def weight_shapes(self) -> dict[str, Size]:
        """Return the names and shapes of the tensors of `weights`, in its order."""
        ...

    def rollout_model(self) -> PreTrainedModel:
        """Return a model for generation: this one if `shares_weights`, otherwise one into which to load `weights`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the complete training state: parameters, optimizer state, number of updates."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`; training then continues bit-identically.

        Raises CheckpointError, with nothing loaded, if the state is of another model.
        """
        ...

    def load_shards(self, described: dict[str, Any], read_into: Callable[[dict[str, Any]], None]) -> None:
        """Load a state as `load_state_dict` does, with each rank reading only its shards.

        `described` is the stored state without contents; `read_into` fills the tensors of such a state in place.
        """
        ...
