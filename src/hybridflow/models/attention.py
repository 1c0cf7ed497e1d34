"""One attention function for all model families, controlled by an attention plan that is passed to the forward call.

A Hugging Face model loaded with `attn_implementation="hybridflow"` passes query, key and value of each layer to the
plan of `model(..., attention_plan=plan)`. Only the plan knows the memory layout of the rows: packed one after another,
padded, or one new token per row on top of a KV cache. The rest of the layer is the model's code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from hybridflow.errors import ModelError
from hybridflow.models.attention_backend import AttentionCase, attention_for, supports_flash
from hybridflow.models.attention_form import AttentionForm, attention_by_form
from hybridflow.models.exact_attention import attend_exactly
from hybridflow.models.kernels.attention import causal_attention
from hybridflow.models.recurrence import Recurrence, States
from hybridflow.models.varlen import PackedLayout, padded, padded_attention, padding_pays, unpadded, varlen_attention

ATTENTION = "hybridflow"

MASKED = ("sliding", "chunked", "sparse")
"""Words in `layer_types` of layers in which a query does not see all tokens before it."""

SHORT = 512
"""Longest sequence for which the compiled kernel is faster than PyTorch's attention on a CPU (docs/benchmarks.md)."""


class AttentionPlan(Protocol):
    """The keys that each query of one forward call attends to, and their memory layout."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Compute the attention of one layer, (batch, tokens, heads, value_dim).

        query (batch, heads, tokens, head_dim); key and value (batch, kv_heads, tokens, head_dim or value_dim). kv_heads
        divides heads; each key-value head is shared by neighboring heads.
        """
        ...


class WholePlan(AttentionPlan, Protocol):
    """The attention of whole sequences, which can be padded to a number of tokens that ranks can split evenly."""

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer of hidden (batch, tokens, width), with the tokens of each sequence as one row."""
        ...

    def with_filling(self, count: int) -> "WholePlan":
        """Return a plan with `count` more padding tokens at the end of each row, whose outputs are unused."""
        ...


@dataclass(frozen=True)
class PackedPlan:
    """Causal attention within each of several sequences that are packed into a single row (batch 1).

    `runs` lists consecutive sequences of equal length as (count, length). On a GPU all sequences are one call
    (`attention_for`). On a CPU consecutive runs of short sequences share one call of the compiled kernel; every other
    run is one batched call of PyTorch's attention.
    """

    runs: tuple[tuple[int, int], ...]
    _layouts: dict[torch.device, PackedLayout] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> "PackedPlan":
        """Build the plan of sequences of these lengths, each at least 1."""
        runs: list[tuple[int, int]] = []
        for length in lengths:
            if runs and runs[-1][1] == length:
                runs[-1] = (runs[-1][0] + 1, length)
            else:
                runs.append((1, length))
        return cls(tuple(runs))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Compute the attention of one layer."""
        if form.exact:
            families = [(length,) for length in self.lengths]
            return attend_exactly(self.attend, layer, query, key, value, form, families)
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (tokens, heads, dim)
        form, scaling = form.within(max(length for _, length in self.runs)), form.scaling
        implementation = attention_for(AttentionCase.of(query, key, value), shares_prompts=False)
        if implementation == "varlen" and (form.is_plain or form.is_windowed):
            layout = self._layout(query.device)
            return varlen_attention(query, key, value, layout, scaling, window=form.window).unsqueeze(0)
        if not form.is_plain:
            tensors = [x.split([count * length for count, length in self.runs]) for x in (query, key, value)]
            parts = zip(zip(*tensors, strict=True), self.runs, strict=True)
            return torch.cat([run_attention(q, k, v, *run, form) for (q, k, v), run in parts])[None]
        if query.device.type == "cuda" and padding_pays(self.lengths):
            attention = partial(pytorch_attention, scaling=scaling)
            return padded_attention(query, key, value, self._layout(query.device), attention).unsqueeze(0)
        return self._attend_by_runs(query, key, value, form, compiled=implementation == "cpu_kernel")

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer of all sequences: as one padded batch if that is small, else run by run."""
        if padding_pays(self.lengths):
            layout = self._layout(hidden.device)
            rows = compute(padded(hidden[0, :, None], layout)[:, 0], None)
            return unpadded(rows[:, None], layout).transpose(0, 1)
        runs = hidden[0].split([count * length for count, length in self.runs])
        rows = [compute(x.unflatten(0, run), None).flatten(0, 1) for x, run in zip(runs, self.runs, strict=True)]
        return torch.cat(rows)[None]

    def recur_with_states(self, layer: int, hidden: Tensor, compute: Recurrence) -> tuple[Tensor, States]:
        """Compute a recurrent layer run by run, without padding, which would be in the states after each sequence."""
        rows, states = list[Tensor](), list[States]()
        parts = hidden[0].split([count * length for count, length in self.runs])
        for x, run in zip(parts, self.runs, strict=True):
            states.append(States(layer))
            rows.append(compute(x.unflatten(0, run), states[-1]).flatten(0, 1))
        return torch.cat(rows)[None], States.joined(states)

    @property
    def lengths(self) -> list[int]:
        """The lengths of the sequences."""
        return [length for count, length in self.runs for _ in range(count)]

    def _layout(self, device: torch.device) -> PackedLayout:
        """Return the layout on a device, which is built at the first of the layers."""
        if device not in self._layouts:
            self._layouts[device] = PackedLayout.of(self.lengths, device)
        return self._layouts[device]

    def _attend_by_runs(
        self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm, *, compiled: bool
    ) -> Tensor:
        """Compute short sequences by the compiled kernel if `compiled`, and PyTorch's attention of each other run."""
        outputs, start = [], 0
        for part in self._parts(compiled):
            size = sum(count * length for count, length in part)
            q, k, v = (x.narrow(0, start, size) for x in (query, key, value))
            if compiled and part[0][1] <= SHORT:
                sequences = [[length] for count, length in part for _ in range(count)]
                outputs.append(causal_attention(q, k, v, sequences, form.scaling))
            else:
                outputs.append(run_attention(q, k, v, *part[0], form))
            start += size
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)

    def with_filling(self, count: int) -> "PackedPlan":
        """Return a plan with one more sequence of `count` padding tokens."""
        return PackedPlan((*self.runs, (1, count))) if count else self

    def _parts(self, compiled: bool) -> list[list[tuple[int, int]]]:
        """Return the runs of each kernel call."""
        parts: list[list[tuple[int, int]]] = []
        for run in self.runs:
            joins = compiled and parts and max(run[1], parts[-1][0][1]) <= SHORT
            if joins:
                parts[-1].append(run)
            else:
                parts.append([run])
        return parts


@dataclass(frozen=True)
class PaddedPlan:
    """Causal attention in rows that are padded on the right.

    Padding follows the real tokens, so they do not attend to it and no mask is needed. Outputs of padding are finite
    and unused.
    """

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Compute the attention of one layer."""
        if form.exact:
            return attend_exactly(self.attend, layer, query, key, value, form, [(key.shape[2],)] * len(key))
        form = form.within(key.shape[2])
        if form.is_plain:
            return pytorch_attention(query, key, value, form.scaling).transpose(1, 2)
        return attention_by_form(query, key, value, form).transpose(1, 2)

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer of the rows as they are."""
        return compute(hidden, None)

    def with_filling(self, count: int) -> "PaddedPlan":
        """Return this plan, which is valid for rows of any length."""
        return self


def run_attention(query: Tensor, key: Tensor, value: Tensor, count: int, length: int, form: AttentionForm) -> Tensor:
    """Compute causal attention of `count` packed sequences of one length, (count * length, heads, dim), as a batch."""
    query, key, value = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (query, key, value))
    return PaddedPlan().attend(0, query, key, value, form).flatten(0, 1)


def pytorch_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, seen: Tensor | None = None) -> Tensor:
    """Compute PyTorch's attention, (batch, heads, tokens, dim), with `seen` as mask; None: causal."""
    dtype, groups = query.dtype, query.shape[1] // key.shape[1]
    if query.device.type == "cuda" and groups > 1 and not _takes_groups(query, key, value, seen):
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        groups = 1
    if query.device.type == "cpu":  # the fused bfloat16 backward is slow there for short sequences
        query, key, value = (x if x.dtype == torch.float64 else x.float() for x in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=groups > 1
    )
    return out.to(dtype)


def _takes_groups(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> bool:
    """Whether PyTorch's attention has a fused kernel for shared key-value heads on a GPU.

    Its other fused kernel does not take them in every version, and its fallback needs memory for all pairs of tokens.
    """
    return seen is None and supports_flash(AttentionCase.of(query, key, value))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    name = type(module).__name__
    if attention_plan is None:
        raise ModelError(f"{name} was called without attention_plan=..., such as a PackedPlan, or does not pass it on")
    if not getattr(module, "is_causal", True):
        raise ModelError(f"{name} is not causal")
    if attention_mask is not None:
        raise ModelError(f"{name} uses attention_mask, which is not supported")
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    types = getattr(module.config, "layer_types", None) or ()
    kind = types[layer] if layer < len(types) else ""
    if sliding_window is None and ("sliding" in kind or not types):  # which Phi-MoE and Qwen2-MoE tell by a mask alone
        sliding_window = getattr(module.config, "sliding_window", None)
    if sliding_window is None and any(word in kind for word in MASKED):
        raise ModelError(f"{name} is a layer of {kind}, which it tells by a mask alone; that is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention_plan.attend(layer, query, key, value, AttentionForm(scale, sliding_window, softcap, s_aux))
    return out.contiguous(), None  # as those of transformers: a layer may take a view of it


AttentionInterface.register(ATTENTION, _attention)
