"""The forward pass of a model: fused for the families that most models are of, its own for all others.

    tokens ──embed──> ┌ norm ─ projections ─ rotary ─ attention (the plan's) ─┐+ ┌ norm ─ gated MLP ┐+ ──> norm ─> head
                      └───────────────────────── each layer ──────────────────┘  └──────────────────┘

The fused pass reads the same parameters and computes the same mathematics as the model's own, for learning and for
prompts. On a CPU one token more for each row is a single call of the compiled decoder.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hybridflow.kernels import Decoder, rms_norm, rotary, silu_mul
from hybridflow.models.attention import AttentionPlan
from hybridflow.models.decoder import decoder_of
from hybridflow.models.kv_cache import DecodePlan
from hybridflow.models.support import has_angles_of_length

FUSED_FAMILIES = ("llama", "qwen2", "qwen3")
"""By `model_type`: pre-norm layers of full attention with rotary embeddings and a gated SiLU, biases where they are."""


class Forward(Protocol):
    """What engines call for logits."""

    def __call__(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        attention_plan: AttentionPlan,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Logits (batch, kept, vocabulary) of input_ids (batch, tokens), or values (batch, kept, 1) of a critic.

        `logits_to_keep`: indices of tokens that the head is computed for; None is every token.
        """
        ...

    def decode(self, tokens: Tensor, plan: DecodePlan) -> Tensor:
        """Logits (rows, vocabulary) of what follows tokens (rows,), which come next in the rows of the plan.

        Their keys and values are added to its cache. No gradient.
        """
        ...

    def pack_weights(self) -> None:
        """Copy the weights into the layout that is fastest to generate with; passes without gradient read the copy.

        Call it again when the weights have changed.
        """
        ...

    def drop_packed_weights(self) -> None:
        """Free that copy, and read the model's weights again."""
        ...


def forward_of(model: PreTrainedModel) -> Forward:
    """The fused forward pass where the model's family has one, else the model's own."""
    return FusedForward(model) if _is_fusable(model) else OwnForward(model)


class OwnForward:
    """The model's own forward pass; any family that `load_causal_lm` accepts."""

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
        arguments = {"position_ids": position_ids, "attention_plan": attention_plan, "use_cache": False}
        if _is_causal_lm(self.model):
            keep = 0 if logits_to_keep is None else logits_to_keep
            return self.model(input_ids, logits_to_keep=keep, **arguments).logits
        logits = self.model(input_ids, **arguments).logits
        return logits if logits_to_keep is None else logits[:, logits_to_keep]

    def decode(self, tokens: Tensor, plan: DecodePlan) -> Tensor:
        return _decode(self, tokens, plan)

    def pack_weights(self) -> None: ...

    def drop_packed_weights(self) -> None: ...


class FusedForward:
    """Llama, Qwen2 and Qwen3 on the kernels of `hybridflow.kernels`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._body: Any = model.model
        self._head: Any = model.lm_head if _is_causal_lm(model) else model.score
        self._epsilon: float = model.config.rms_norm_eps
        self._angles: tuple[Tensor, Tensor] | None = None
        self._decoder: Decoder | None = None

    def pack_weights(self) -> None:
        self._decoder = None  # its memory first
        self._decoder = decoder_of(self._body, self._head, self._epsilon)

    def drop_packed_weights(self) -> None:
        self._decoder = None

    def decode(self, tokens: Tensor, plan: DecodePlan) -> Tensor:
        if self._decoder is None:
            return _decode(self, tokens, plan)
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
        batch, tokens = input_ids.shape
        cos, sin = self._cos_sin(position_ids.expand(batch, tokens).flatten())
        recompute = self.model.training  # as the models of transformers do: nothing else depends on the mode
        packed = None if torch.is_grad_enabled() else self._decoder
        hidden = self._body.embed_tokens(input_ids).flatten(0, 1)
        for index in range(len(self._body.layers)):
            arguments = (index, hidden, cos, sin, attention_plan, batch)
            if packed:
                hidden = _packed_layer(packed, *arguments)
            elif recompute:
                hidden = checkpoint(self._layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = self._layer(*arguments)
        if logits_to_keep is not None:
            hidden = hidden.view(batch, tokens, -1)[:, logits_to_keep].flatten(0, 1)
        hidden = self._norm(hidden, self._body.norm)
        logits = packed.head(hidden) if packed else self._head(hidden)
        return logits.view(batch, -1, self._head.out_features)

    def _layer(self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, batch: int) -> Tensor:
        """One decoder layer on hidden (batch * tokens, width)."""
        layer = self._body.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        x = self._norm(hidden, layer.input_layernorm)
        query, key, value = (
            projection(x).view(len(x), -1, attention.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = self._norm(query, attention.q_norm), self._norm(key, attention.k_norm)
        query, key = rotary(query, cos, sin), rotary(key, cos, sin)
        query, key, value = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        attended = plan.attend(index, query, key, value, attention.scaling)
        hidden = _add_linear(hidden, attended.reshape(len(hidden), -1), attention.o_proj)
        x = self._norm(hidden, layer.post_attention_layernorm)
        return _add_linear(hidden, silu_mul(mlp.gate_proj(x), mlp.up_proj(x)), mlp.down_proj)

    def _norm(self, x: Tensor, module: Any) -> Tensor:
        return rms_norm(x, module.weight, self._epsilon)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, head_dim / 2) each."""
        cos, sin = self._angles_up_to(int(positions.max()))
        return cos[positions], sin[positions]

    def _angles_up_to(self, position: int) -> tuple[Tensor, Tensor]:
        """cos and sin (at least position + 1, head_dim / 2), from a table that grows with the positions asked for."""
        if self._angles is None or len(self._angles[0]) <= position:
            size = 1 << position.bit_length()
            dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
            self._angles = _angles(self._body, torch.arange(size, device=self.model.device), dtype)
        return self._angles


def _decode(forward: Forward, tokens: Tensor, plan: DecodePlan) -> Tensor:
    """As one token each of a batch."""
    return forward(tokens[:, None], position_ids=plan.ends[:, None], attention_plan=plan)[:, -1]


@torch.no_grad()
def _angles(body: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, (positions, head_dim / 2), as the model itself computes them; it repeats both halves."""
    like = torch.zeros((), dtype=dtype, device=positions.device)
    cos, sin = (x[0, :, : x.shape[-1] // 2].contiguous() for x in body.rotary_emb(like, positions[None]))
    return cos, sin


def _packed_layer(
    decoder: Decoder, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, batch: int
) -> Tensor:
    """One decoder layer without gradient on packed weights: what the decoder computes, for many tokens of a row."""
    layer, epsilon = decoder.layers[index], decoder.epsilon
    projected = layer.qkv(rms_norm(hidden, layer.norm, epsilon)).unflatten(1, (-1, decoder.head_dim))
    query, key, value = projected.split([decoder.heads, decoder.kv_heads, decoder.kv_heads], dim=1)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = rms_norm(query, layer.query_norm, epsilon), rms_norm(key, layer.key_norm, epsilon)
    query, key = rotary(query, cos, sin), rotary(key, cos, sin)
    query, key, value = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (query, key, value))
    attended = plan.attend(index, query, key, value, decoder.scaling)
    hidden = layer.out(attended.reshape(len(hidden), -1), hidden)
    return layer.down(layer.gate_up(rms_norm(hidden, layer.mlp_norm, epsilon)), hidden)


def _add_linear(residual: Tensor, x: Tensor, module: nn.Module) -> Tensor:
    """residual + module(x), in one product where that is possible."""
    if type(module) is nn.Linear and module.bias is None:
        return torch.addmm(residual, x, module.weight.t())
    return residual + module(x)


def _is_causal_lm(model: PreTrainedModel) -> bool:
    return type(model).__name__.endswith("ForCausalLM")


def _is_fusable(model: PreTrainedModel) -> bool:
    config = model.config
    if config.model_type not in FUSED_FAMILIES or config.hidden_act not in ("silu", "swish"):
        return False
    if has_angles_of_length(config):
        return False
    body: Any = model.model
    cos, _ = _angles(body, torch.zeros(1, dtype=torch.int64, device=model.device), torch.float32)
    return 2 * cos.shape[-1] == body.layers[0].self_attn.head_dim  # the whole head is rotated
