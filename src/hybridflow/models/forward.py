"""The forward pass of a model as engines call it, and the one of the model's own code, for any family."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.errors import ModelConfigError
from hybridflow.models.attention import AttentionPlan
from hybridflow.models.kv_cache import DecodePlan
from hybridflow.models.paged_kv_cache import PagedDecodePlan
from hybridflow.models.tensor_parallel import VocabularyRanks

ReadLogits = Callable[[Tensor, slice], Sequence[Tensor]]
"""(logits (some tokens, vocabulary), slice of these tokens) -> results per token, such as log-probs, (tokens,) each."""

MAX_LOGITS = 1 << 28
"""Largest number of logits in memory at once, with their gradient: half a GiB each in bfloat16."""
MEMORY_PER_LOGIT = 32
"""On a GPU, bytes of its memory for each of the logits that are kept for the backward pass, if that allows more than
MAX_LOGITS: in bfloat16 they take 1/16 of the memory. Logits beyond it are computed twice."""
PARTS_KEPT = 2
"""Number of parts in which the logits that are kept are computed, if they are more than MAX_LOGITS: the gradient in
memory is that of one part."""
MOST_INDEXED = 2**31 - 1
"""Most elements that a kernel indexes in 32 bits. For more, compiled kernels are compiled again, and index slower."""


class Forward(Protocol):
    """The forward pass as engines call it."""

    is_capturable: bool
    """Whether the host reads no value from a GPU in `decode` with a PagedDecodePlan: it can be a CUDA graph."""
    is_exact: bool
    """Whether its results for a token have the same bits in each batch and layout, in training and in decoding."""
    routes: Tensor | None
    """The routes of the last call, (tokens, *routes_shape), if they are recorded; see `RecordingForward`."""
    routes_shape: tuple[int, int]
    """The numbers of layers with experts, and of experts of a token in each; (0, 0) if they are not recorded."""

    @property
    def vocabulary(self) -> VocabularyRanks | None:
        """The entries of the vocabulary on each rank, under tensor parallel; otherwise None."""
        ...

    def __call__(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        attention_plan: AttentionPlan,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Compute logits (batch, kept, vocabulary) of input_ids (batch, tokens), or a critic's values (batch, kept, 1).

        `logits_to_keep`: indices of the tokens for which the head is computed; None: all tokens.
        """
        ...

    def read_logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        read: ReadLogits,
        *,
        position_ids: Tensor,
        attention_plan: AttentionPlan,
    ) -> Sequence[Tensor]:
        """Apply `read` to the logits of the tokens at `positions` of the flattened input_ids.

        Results are (positions,) each. `read` gets the logits of some tokens at a time, for this rank's entries of the
        vocabulary, and must treat each token independently. Where not all logits are kept in memory, the backward pass
        calls it again.
        """
        ...

    def decode(self, tokens: Tensor, plan: DecodePlan | PagedDecodePlan) -> Tensor:
        """Append tokens (rows,) to the rows of the plan, and compute the logits (rows, vocabulary) of the next tokens.

        The keys and values of the tokens are added to the plan's cache. No gradient.
        """
        ...

    def compile(self) -> None:
        """Use torch.compile for the layers from the next call on. Raises ModelError if it is not supported."""
        ...

    def pack_weights(self) -> None:
        """Copy the weights into the fastest layout for generation; passes without gradient read the copy.

        Call it again after the weights have changed.
        """
        ...

    def drop_packed_weights(self) -> None:
        """Free the copy of `pack_weights`, and read the model's weights again."""
        ...


def max_logits_on(device: torch.device) -> int:
    """Return the largest number of logits that a forward pass keeps in the memory of a device."""
    return max_logits_of(memory_of(device))


def memory_of(device: torch.device) -> int:
    """Return the memory of a GPU in bytes; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def max_logits_of(memory_bytes: int) -> int:
    """Return the largest number of logits that a forward pass keeps on a GPU of this memory, in bytes."""
    return max(MAX_LOGITS, memory_bytes // MEMORY_PER_LOGIT)


def parts_of_logits(tokens: int, entries: int, max_logits: int) -> tuple[int, int]:
    """Return the number of tokens whose logits are computed at once, and the first token whose logits are kept.

    The backward pass starts with the last part, so the last ones are kept: it has freed them when it computes the
    logits of the others again. Results do not depend on which are kept.
    """
    part = min(max(max_logits // PARTS_KEPT, min(max_logits, MAX_LOGITS)), MOST_INDEXED)
    size, kept = (max(1, logits // max(1, entries)) for logits in (part, max_logits))
    return size, max(0, -(-(tokens - kept) // size)) * size


class OwnForward:
    """The forward pass of the model's code, for any family that `load_causal_lm` accepts."""

    vocabulary = None
    is_capturable = is_exact = False
    routes: Tensor | None = None
    routes_shape: tuple[int, int] = (0, 0)

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        attention_plan: AttentionPlan,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Compute logits, or values of a critic."""
        arguments = {"position_ids": position_ids, "attention_plan": attention_plan, "use_cache": False}
        if is_causal_lm(self.model):
            keep = 0 if logits_to_keep is None else logits_to_keep
            return self.model(input_ids, logits_to_keep=keep, **arguments).logits
        logits = self.model(input_ids, **arguments).logits
        return logits if logits_to_keep is None else logits[:, logits_to_keep]

    def read_logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        read: ReadLogits,
        *,
        position_ids: Tensor,
        attention_plan: AttentionPlan,
    ) -> Sequence[Tensor]:
        """Apply `read` once to the logits of the tokens at `positions`."""
        arguments = {"position_ids": position_ids, "attention_plan": attention_plan}
        columns = input_ids.shape[1]
        if len(input_ids) == 1:  # packed
            return read(self(input_ids, logits_to_keep=positions, **arguments)[0], slice(None))
        rows, offsets = positions // columns, positions % columns
        first = int(offsets.min()) if len(offsets) else columns - 1
        kept = torch.arange(first, columns, device=positions.device)
        logits = self(input_ids, logits_to_keep=kept, **arguments)
        return read(logits[rows, offsets - first], slice(None))

    def decode(self, tokens: Tensor, plan: DecodePlan | PagedDecodePlan) -> Tensor:
        """Compute the logits that follow one more token per row."""
        return decode_by(self, tokens, plan)

    def compile(self) -> None:
        """Raise ModelConfigError: the model's code is not compiled."""
        raise ModelConfigError(
            f"model.compile=true is not supported for {self.model.config.model_type} models, which run their own code; "
            "use model.compile = false, or a Llama, Qwen2 or Qwen3 model."
        )

    def pack_weights(self) -> None:
        """Do nothing: there is no packed layout."""

    def drop_packed_weights(self) -> None:
        """Do nothing: there is no packed layout."""


def decode_by(forward: Forward, tokens: Tensor, plan: DecodePlan | PagedDecodePlan) -> Tensor:
    """Decode by the forward pass of a batch with one token per row."""
    return forward(tokens[:, None], position_ids=plan.ends[:, None], attention_plan=plan)[:, -1]


def is_causal_lm(model: PreTrainedModel) -> bool:
    """Return whether the model has a head for the vocabulary; a critic has one for values."""
    return type(model).__name__.endswith("ForCausalLM")
