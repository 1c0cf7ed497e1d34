"""Layers with a state instead of keys and values, such as the gated delta rule of Qwen3-Next and Qwen3.5.

Their modules know sequences as rows of a batch, and their states as a cache of transformers. Here each asks the
attention plan of the call, which knows the sequences: their tokens become rows, padded at the end, whose outputs depend
on the tokens before them alone. While sequences decode, their states are tensors with one row each.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from hybridflow.errors import ModelError

Recurrence = Callable[[Tensor, "States | None"], Tensor]
"""(hidden (rows, tokens, width), states of the rows before these tokens or None) -> outputs of the same shape.

States that are given are replaced by those after the tokens.
"""

KINDS = ("conv", "recurrent")


class States:
    """The states of a layer, of some rows: `tensors` are (rows, ...) each; none before the first tokens."""

    def __init__(self, layer: int, tensors: dict[tuple[str, int], Tensor] | None = None) -> None:
        self.layer, self.tensors = layer, tensors or {}

    def of_rows(self, index: Any) -> "States":
        """Return the states of some rows: views for a slice, else copies."""
        return States(self.layer, {name: x[index] for name, x in self.tensors.items()})

    def write(self, rows: Tensor, new: "States | None") -> None:
        """Set the states of some rows; None: to those before the first tokens."""
        for name, x in self.tensors.items():
            x[rows] = 0.0 if new is None else new.tensors[name]

    def rows_like(self, count: int) -> "States":
        """Return states of `count` rows before their first tokens, in memory of their own."""
        return States(self.layer, {name: x.new_zeros(count, *x.shape[1:]) for name, x in self.tensors.items()})

    @property
    def nbytes(self) -> int:
        """The memory of the states, in bytes."""
        return sum(x.nbytes for x in self.tensors.values())

    @classmethod
    def joined(cls, parts: Sequence["States"]) -> "States":
        """Return the states of the rows of all parts, one after another."""
        parts = [part for part in parts if part.tensors]
        names = parts[0].tensors
        return cls(parts[0].layer, {name: torch.cat([part.tensors[name] for part in parts]) for name in names})

    def as_cache(self) -> Cache:
        """Return a cache of transformers that writes into these tensors."""
        of_layer: Any = LinearAttentionLayer(max((state for _, state in self.tensors), default=0) + 1)
        for (kind, state), x in self.tensors.items():
            getattr(of_layer, f"{kind}_states")[state] = x
            getattr(of_layer, f"is_{kind}_states_initialized")[state] = True
            of_layer.has_previous_state[state] = True
            if kind == "conv":
                of_layer.dtype, of_layer.device, of_layer.conv_kernel_size[state] = x.dtype, x.device, x.shape[-1]
        layers: list[Any] = [*[None] * self.layer, of_layer]
        return Cache(layers=layers)

    def read(self, cache: Cache) -> None:
        """Take the states that a module has left in a cache."""
        of_layer: Any = cache.layers[self.layer]
        for kind in KINDS:
            found = getattr(of_layer, f"{kind}_states").items()
            self.tensors |= {(kind, state): x for state, x in found if x is not None}


def plan_recurrences(model: PreTrainedModel) -> None:
    """Let each recurrent module of a model ask the attention plan of a call how its tokens are sequences."""
    for module in model.modules():
        if name := _cache_argument(module):
            module.forward = partial(_planned, module, module.forward, name)


def _cache_argument(module: nn.Module) -> str | None:
    """Return the name by which a recurrent module of a layer takes its states; None if it is another module."""
    return _cache_argument_of(type(module)) if hasattr(module, "layer_idx") else None


@cache
def _cache_argument_of(module: type[nn.Module]) -> str | None:
    source = inspect.getsource(module)
    if not any(f"update_{kind}_state(" in source for kind in KINDS):
        return None
    arguments = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in arguments), None)


def _planned(
    module: Any,
    forward: Callable[..., Tensor],
    name: str,
    hidden_states: Tensor,
    *_: object,
    attention_plan: Any = None,
    **ignored: object,
) -> Tensor:
    """Compute a recurrent module by the plan of the call."""
    if attention_plan is None:
        raise ModelError(f"{type(module).__name__} was called without attention_plan=...")

    def compute(hidden: Tensor, states: States | None) -> Tensor:
        if states is None:
            return forward(hidden)
        in_cache = states.as_cache()
        out = forward(hidden, **{name: in_cache})
        states.read(in_cache)
        return out

    return attention_plan.recur(module.layer_idx, hidden_states, compute)
