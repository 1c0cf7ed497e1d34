"""What the layers of a model compute and keep, seen in passes of the model's own code on the meta device.

Windows, heads, states and the bytes that autograd keeps are those for which the code asks, so no list of families is
needed: an attention plan sees what each layer gives it, and each kind of layer computes tokens without memory.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hybridflow.errors import ModelError
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.experts import experts_of
from hybridflow.models.model_files import LOADING_ERRORS
from hybridflow.models.parameters import layers_of
from hybridflow.models.recurrence import Recurrence, States

TOKENS = 1009
"""Tokens of a pass: a prime, so that no activation has the shape of a weight."""


@dataclass(frozen=True)
class AttentionSize:
    """The numbers of heads that a layer gives to attention, and their widths."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    form: AttentionForm


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of a layer: what autograd keeps, and besides it what computes forward and backward passes.

    `forward` is of a pass without gradient. Gradients of weights do not count. `heads`: of its attention, 0 without;
    `window`: 0 without; `copies`: of its scores, which soft caps and sinks make.
    """

    kept: int
    forward: int
    backward: int
    heads: int = 0
    window: int = 0
    copies: int = 0


class SeeingPlan:
    """An attention plan that computes nothing: it keeps what layers give to it, by layer."""

    def __init__(self) -> None:
        self.attention: dict[int, AttentionSize] = {}
        self.states: dict[int, States] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Return a tensor with the shape of the output, for which autograd keeps what kernels of attention keep."""
        self.attention[layer] = AttentionSize(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], form)
        return _AttentionWithoutMemory.apply(query, key, value)  # pyright: ignore[reportReturnType]

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer of one sequence, without gradient with the states that follow it."""
        if torch.is_grad_enabled():
            return compute(hidden, None)
        self.states[layer] = States(layer)
        return compute(hidden, self.states[layer])

    @property
    def state_size(self) -> int:
        """The numbers of a sequence's recurrent states, besides those of convolutions."""
        tensors = (each for states in self.states.values() for each in states.tensors.items())
        return sum(x.numel() for (kind, _), x in tensors if kind != "conv")

    @property
    def state_bytes(self) -> int:
        """The bytes of all states of a sequence."""
        return sum(x.nbytes for states in self.states.values() for x in states.tensors.values())


class _AttentionWithoutMemory(torch.autograd.Function):
    """Keeps queries, keys, values, the output, and a float32 number per head, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, tokens, heads, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def see_layers(model: PreTrainedModel) -> SeeingPlan | None:
    """Return what the layers of a model on the meta device give to attention, and their states.

    None if its code needs the values of tensors.
    """
    plan = SeeingPlan()
    return plan if _pass(model, plan, 2) else None


def bytes_of_layers(model: PreTrainedModel) -> tuple[LayerBytes, ...]:
    """Return the bytes of each layer of a model on the meta device, which `see_layers` has seen."""
    plan, calls, found = SeeingPlan(), dict[nn.Module, tuple[tuple, dict]](), dict[str, tuple[int, int, int]]()
    layers = layers_of(model)

    def keep(layer: nn.Module, arguments: tuple, named: dict) -> None:
        calls[layer] = (arguments, named)

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    _pass(model, plan, TOKENS)
    for hook in hooks:
        hook.remove()
    of_layers = []
    for place, layer in enumerate(layers):
        kind = repr([(name, parameter.shape) for name, parameter in layer.named_parameters()])
        if kind not in found:
            found[kind] = _bytes_of(layer, *calls[layer])
        seen = plan.attention.get(place)
        form = seen.form if seen else AttentionForm(1.0)
        copies = (form.softcap is not None) + (form.sinks is not None)
        of_layers.append(LayerBytes(*found[kind], seen.heads if seen else 0, form.window or 0, copies))
    return tuple(of_layers)


def _pass(model: PreTrainedModel, plan: SeeingPlan, tokens: int) -> bool:
    """Compute the body of a model without gradient; return whether that is possible without values."""
    if experts_of(model):
        model.set_experts_implementation("grouped_mm")
    model.to(torch.device("meta"))  # pyright: ignore[reportArgumentType]
    embedding: Any = model.get_input_embeddings()
    hidden = torch.empty(1, tokens, embedding.weight.shape[-1], dtype=embedding.weight.dtype, device="meta")
    places = torch.arange(tokens, device="meta")[None]
    try:
        with torch.no_grad(), _Products():
            model.base_model(inputs_embeds=hidden, position_ids=places, attention_plan=plan, use_cache=False)
    except (*LOADING_ERRORS, ModelError):
        return False
    return True


def _bytes_of(layer: nn.Module, arguments: tuple, named: dict) -> tuple[int, int, int]:
    """Return what a layer keeps, and what it needs in a pass without gradient and in a backward pass."""
    hidden = (arguments[0] if arguments else named["hidden_states"]).detach().requires_grad_()
    rest = arguments[1:] if arguments else ()
    named = {name: value for name, value in named.items() if name != "hidden_states"}
    given = [x for x in tree_leaves((hidden, rest, named, *layer.parameters(), *layer.buffers())) if torch.is_tensor(x)]
    shapes = [x.shape for x in layer.parameters()]
    weights = {*shapes, *((*shape[:-2], shape[-1], shape[-2]) for shape in shapes if len(shape) > 1)}

    def compute() -> Tensor:
        out = layer(hidden, *rest, **named)
        return out[0] if isinstance(out, tuple) else out

    with torch.no_grad(), _LiveBytes(given, weights) as live:
        compute()
    forward = live.peak
    with torch.enable_grad(), _LiveBytes(given, weights) as live:
        out = compute()
        kept = live.peak = live.bytes
        out.backward(torch.empty_like(out))
    for parameter in layer.parameters():
        parameter.grad = None
    return kept // TOKENS, forward // TOKENS, (live.peak - kept) // TOKENS


class _Products(TorchDispatchMode):
    """Gives the products of experts a result on the meta device in all dtypes; torch has one for bfloat16 alone."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right, offsets = args[:3] if len(args) > 2 else (*args, (kwargs or {})["offs"])
        groups = () if right.ndim == 3 else (len(offsets),)
        return left.new_empty(*groups, left.shape[0], right.shape[-1])


class _LiveBytes(_Products):
    """Counts the bytes of the tensors that operations make: those which exist, and the most that existed at once.

    Tensors that are given, and those with the shape of a weight, do not count.
    """

    def __init__(self, given: Iterable[Tensor], weights: set[Any]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known, self._weights = {x.untyped_storage()._cdata for x in given}, weights

    def __torch_dispatch__(self, *call: Any) -> Any:
        out = super().__torch_dispatch__(*call)
        for x in tree_leaves(out):
            if torch.is_tensor(x) and x.shape not in self._weights:
                self._count(x.untyped_storage())
        self.peak = max(self.peak, self.bytes)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.bytes -= size
