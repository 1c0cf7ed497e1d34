"""The fused forward pass of common model families; `forward_of` chooses it or the model's own code.

    tokens ──embed──> ┌ norm ─ projections ─ rotary ─ attention (the plan's) ─┐+ ┌ norm ─ gated MLP ┐+ ──> norm ─> head
                      └───────────────────────── each layer ──────────────────┘  └──────────────────┘

It reads the same parameters and computes the same mathematics as the model's code, for training and for prompts. On a
CPU, decoding one more token per row is a single call of the compiled decoder, on a copy of the weights in its layout.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hybridflow.models.attention import AttentionPlan
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.forward import (
    ReadLogits,
    decode_by,
    is_causal_lm,
    max_logits_on,
    parts_of_logits,
)
from hybridflow.models.kernels.decoder import Decoder
from hybridflow.models.kernels.elementwise import rms_norm, rotary, silu_mul
from hybridflow.models.kv_cache import DecodePlan
from hybridflow.models.packed_weights import decoder_of, packed_layer
from hybridflow.models.paged_kv_cache import PagedDecodePlan
from hybridflow.models.support import has_angles_of_length, is_plain_decoder
from hybridflow.models.tensor_parallel import TensorRanks, VocabularyRanks
from hybridflow.runtime.boxes import local

COMPILATIONS = 64
"""Largest number of compilations of a layer by torch.compile in a process; beyond it, layers run uncompiled."""


class FusedForward:
    """The fused forward pass of Llama, Qwen2 and Qwen3, on the kernels of `hybridflow.models.kernels`.

    In a sharded model it replaces the `forward` of the modules.
    """

    is_capturable, is_exact = True, False
    routes: Tensor | None = None
    routes_shape: tuple[int, int] = (0, 0)

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        is_sharded: bool = False,
        tensor: TensorRanks | None = None,
    ) -> None:
        self.model, self.max_logits, self._tensor = model, max_logits_on(model.device), tensor
        self._body: Any = model.model
        self._head: Any = model.lm_head if is_causal_lm(model) else model.score
        self._epsilon: float = model.config.rms_norm_eps
        self._angles: tuple[Tensor, Tensor] | None = None
        self._decoder: Decoder | None = None
        self._open, self._close = self._open_layer, self._close_layer
        self._run: Callable[..., Any] = self._run_layers
        self._layers: list[Callable[..., Tensor]] = [partial(self._layer, layer) for layer in self._body.layers]
        embed, logits = self._body.embed_tokens, self._head
        if is_sharded:  # without the hooks, which run when the module is called
            embed, logits = embed.forward, logits.forward
        if tensor is not None:
            embed = partial(tensor.embed, self._body.embed_tokens)
            logits = partial(tensor.logits if is_causal_lm(model) else tensor.linear, self._head)
        if self.is_exact:
            logits = partial(self._linear, self._head)
        self._embed, self._read_head = embed, partial(self._read, logits)
        if is_sharded:
            modules = [model, self._body.embed_tokens, *self._body.layers, self._head]
            computed = [self._run_layers, self._embed, *self._layers, self._read_head]
            for module, forward in zip(modules, computed, strict=True):
                module.forward = forward
            self._run, self._embed, *self._layers, self._read_head = modules

    @property
    def vocabulary(self) -> VocabularyRanks | None:
        """The entries of the vocabulary on each rank, under tensor parallel; None for a critic or without it."""
        if self._tensor is None or not is_causal_lm(self.model):
            return None
        return self._tensor.vocabulary(self._head.out_features)

    def compile(self) -> None:
        """Compile the parts of a layer before and after attention (torch.compile), for any number of tokens.

        One compilation serves all layers and all models of a process with the same kind of layer.
        """
        import torch._dynamo.config
        import torch._inductor.config

        # Roles of one process that differ in dtype, adapters or gradients share these functions, and its limit of 8.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILATIONS)
        # No choice of a kernel by its measured time, on which rounding would depend.
        torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()
        self._open = torch.compile(self._open_layer, dynamic=True)
        self._close = torch.compile(self._close_layer, dynamic=True)

    def pack_weights(self) -> None:
        """Copy the weights into a compiled decoder, if kernels support the model."""
        self._decoder = None  # frees its memory before the new copy is made
        self._decoder = decoder_of(self._body, self._head, self._epsilon)

    def drop_packed_weights(self) -> None:
        """Free the compiled decoder."""
        self._decoder = None

    def decode(self, tokens: Tensor, plan: DecodePlan | PagedDecodePlan) -> Tensor:
        """Compute the logits that follow one more token per row, with the compiled decoder if there is one."""
        if self._decoder is None or not isinstance(plan, DecodePlan):
            return decode_by(self, tokens, plan)
        cache, angles = plan.cache, self._angles_up_to(plan.longest)
        return self._decoder(tokens, plan.ends, plan.longest, cache.keys, cache.values, *angles)

    def __call__(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        attention_plan: AttentionPlan,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Compute logits, or values of a critic."""
        batch, tokens = input_ids.shape
        positions = None
        if logits_to_keep is not None:
            positions = (torch.arange(batch, device=input_ids.device)[:, None] * tokens + logits_to_keep).flatten()
        return self._run(input_ids, position_ids, attention_plan, positions).unflatten(0, (batch, -1))

    def read_logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        read: ReadLogits,
        *,
        position_ids: Tensor,
        attention_plan: AttentionPlan,
    ) -> Sequence[Tensor]:
        """Apply `read` to the logits of the tokens at `positions`, some tokens at a time if there are many."""
        return self._run(input_ids, position_ids, attention_plan, positions, read)

    def _run_layers(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        plan: AttentionPlan,
        positions: Tensor | None,
        read: ReadLogits | None = None,
    ) -> Any:
        """Compute logits (positions, vocabulary), or the results of `read`."""
        batch, tokens = input_ids.shape
        cos, sin = self._cos_sin(position_ids.expand(batch, tokens).flatten())
        packed = None if torch.is_grad_enabled() else self._decoder
        hidden = self._embed(input_ids.flatten())  # no view, so that the first layer is compiled as the others are
        for index, layer in enumerate(self._layers):
            arguments = (hidden, cos, sin, plan, batch)
            if packed:
                hidden = packed_layer(packed, index, *arguments, self._form(packed.scaling))
            else:
                hidden = layer(*arguments)
        hidden = self._norm(hidden if positions is None else hidden[positions], self._body.norm)
        return self._read(packed.head, hidden, read) if packed else self._read_head(hidden, read)

    def _read(self, logits: Callable[[Tensor], Tensor], hidden: Tensor, read: ReadLogits | None) -> Any:
        """Return the logits, or apply `read` to them, in parts if there are many; those not kept are computed again."""
        if read is None:
            return logits(hidden)

        def part(hidden: Tensor, which: slice) -> Sequence[Tensor]:
            return read(logits(hidden), which)

        entries = self._head.out_features
        entries = self._tensor.part(entries) if self._tensor else entries  # all ranks make the same parts
        size, first_kept = parts_of_logits(len(hidden), entries, self.max_logits)
        if len(hidden) <= size:
            # Copies, because FSDP2 registers its backward hook on the returned tensors and warns about views, on which
            # an in-place operation would drop the hook. They hold one number per token.
            return [result.clone() for result in part(hidden, slice(None))]
        again = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
        parts = []
        for start in range(0, len(hidden), size):
            which = slice(start, start + size)
            parts.append((part if start >= first_kept else again)(hidden[which], which))
        return [torch.cat(results) for results in zip(*parts, strict=True)]

    def _layer(self, layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, batch: int) -> Tensor:
        """Compute one decoder layer on hidden (batch * tokens, width)."""
        arguments = (layer, hidden, cos, sin, plan, batch)
        if self.model.training:  # recompute activations, as transformers does; nothing else depends on the mode
            return checkpoint(self._compute_layer, *arguments, use_reentrant=False, preserve_rng_state=False)
        return self._compute_layer(*arguments)

    def _compute_layer(
        self, layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, batch: int
    ) -> Tensor:
        query, key, value = self._open(layer, hidden, cos, sin, batch)
        attended = plan.attend(layer.self_attn.layer_idx, query, key, value, self._form(layer.self_attn.scaling))
        return self._close(layer, hidden, attended.reshape(len(hidden), -1))

    def _open_layer(
        self, layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, batch: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values, (batch, heads, tokens, head_dim)."""
        attention = layer.self_attn
        x = self._copy(self._norm(hidden, layer.input_layernorm))
        query, key, value = (
            self._linear(projection, x).view(len(x), -1, attention.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):  # applied to the heads of this rank
            query, key = self._head_norm(query, attention.q_norm), self._head_norm(key, attention.k_norm)
        query, key = (self._apply(rotary, x, cos, sin) for x in (query, key))
        query, key, value = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        return query, key, value

    def _close_layer(self, layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
        """Compute the part of a layer after attention."""
        mlp = layer.mlp
        hidden = self._add_linear(hidden, attended, layer.self_attn.o_proj)
        x = self._copy(self._norm(hidden, layer.post_attention_layernorm))
        gated = self._apply(silu_mul, self._linear(mlp.gate_proj, x), self._linear(mlp.up_proj, x))
        return self._add_linear(hidden, gated, mlp.down_proj)

    def _apply(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return function(*arguments)

    def _form(self, scaling: float) -> AttentionForm:
        return AttentionForm(scaling)

    def _copy(self, x: Tensor) -> Tensor:
        return self._tensor.copy(x) if self._tensor else x

    def _linear(self, module: Any, x: Tensor) -> Tensor:
        return self._tensor.linear(module, x) if self._tensor else module(x)

    def _add_linear(self, residual: Tensor, x: Tensor, module: Any) -> Tensor:
        return residual + self._tensor.linear_sum(module, x) if self._tensor else _add_linear(residual, x, module)

    def _norm(self, x: Tensor, module: Any) -> Tensor:
        return self._apply(rms_norm, x, local(module.weight), self._epsilon)

    def _head_norm(self, x: Tensor, module: Any) -> Tensor:
        return self._apply(rms_norm, x, self._copy(local(module.weight)), self._epsilon)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin at these positions, (tokens, head_dim / 2) each."""
        if positions.device.type != "cpu":  # the host would wait for the device to know the longest position
            return _angles(self._body, positions, self._angle_dtype)
        cos, sin = self._angles_up_to(int(positions.max()))
        return cos[positions], sin[positions]

    @property
    def _angle_dtype(self) -> torch.dtype:
        return torch.float64 if self.model.dtype == torch.float64 else torch.float32

    def _angles_up_to(self, position: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin (at least position + 1, head_dim / 2) from a table that grows as needed."""
        if self._angles is None or len(self._angles[0]) <= position:
            size = 1 << position.bit_length()
            self._angles = _angles(self._body, torch.arange(size, device=self.model.device), self._angle_dtype)
        return self._angles


@torch.no_grad()
def _angles(body: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (positions, head_dim / 2), of the model's rotary embedding, which repeats both halves."""
    like = torch.zeros((), dtype=dtype, device=positions.device)
    cos, sin = (x[0, :, : x.shape[-1] // 2].contiguous() for x in body.rotary_emb(like, positions[None]))
    return cos, sin


def _add_linear(residual: Tensor, x: Tensor, module: nn.Module) -> Tensor:
    """Return residual + module(x), fused into one product if the module is a plain linear layer without bias."""
    if type(module) is nn.Linear and module.bias is None:
        return torch.addmm(residual, x, module.weight.t())
    return residual + module(x)


def is_fusable(model: PreTrainedModel) -> bool:
    """Return whether the fused forward pass computes this model."""
    config = model.config
    is_gated_silu = getattr(config, "hidden_act", None) in ("silu", "swish")
    if not is_plain_decoder(config) or not is_gated_silu or has_angles_of_length(config):
        return False
    body: Any = model.model
    cos, _ = _angles(body, torch.zeros(1, dtype=torch.int64, device=model.device), torch.float32)
    return 2 * cos.shape[-1] == body.layers[0].self_attn.head_dim  # no partial rotary embedding
