"""A copy of a model's weights in the layout of the compiled decoder, and a layer on it for many tokens per row."""

from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.models.attention import AttentionPlan
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.kernels.decoder import Decoder, DecoderLayer, PackedLinear
from hybridflow.models.kernels.elementwise import rms_norm, rotary
from hybridflow.models.kernels.library import serves


def decoder_of(body: Any, head: Any, epsilon: float) -> Decoder | None:
    """Build the compiled decoder; None if no kernel supports the model, or it has adapters, whose modules must run."""
    products = [module for layer in body.layers for name, module in layer.named_modules() if name.endswith("_proj")]
    if type(body.embed_tokens) is not nn.Embedding or not all(_is_packable(module) for module in [*products, head]):
        return None
    attention = body.layers[0].self_attn
    return Decoder(
        body.embed_tokens.weight.detach().contiguous(),
        [_decoder_layer(layer) for layer in body.layers],
        _weight_of(body.norm),
        _packed(head),
        heads=attention.q_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        epsilon=epsilon,
        scaling=attention.scaling,
    )


def packed_layer(
    decoder: Decoder,
    index: int,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    plan: AttentionPlan,
    batch: int,
    form: AttentionForm,
) -> Tensor:
    """Compute one decoder layer without gradient on packed weights, for many tokens per row."""
    layer, epsilon = decoder.layers[index], decoder.epsilon
    projected = layer.qkv(rms_norm(hidden, layer.norm, epsilon)).unflatten(1, (-1, decoder.head_dim))
    query, key, value = projected.split([decoder.heads, decoder.kv_heads, decoder.kv_heads], dim=1)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = rms_norm(query, layer.query_norm, epsilon), rms_norm(key, layer.key_norm, epsilon)
    query, key = rotary(query, cos, sin), rotary(key, cos, sin)
    query, key, value = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (query, key, value))
    attended = plan.attend(index, query, key, value, form)
    hidden = layer.out(attended.reshape(len(hidden), -1), hidden)
    return layer.down(layer.gate_up(rms_norm(hidden, layer.mlp_norm, epsilon)), hidden)


def _decoder_layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        norm=_weight_of(layer.input_layernorm),
        qkv=_packed(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=_weight_of(getattr(attention, "q_norm", None)),
        key_norm=_weight_of(getattr(attention, "k_norm", None)),
        out=_packed(attention.o_proj),
        mlp_norm=_weight_of(layer.post_attention_layernorm),
        gate_up=_packed(mlp.gate_proj, mlp.up_proj, gated=True),
        down=_packed(mlp.down_proj),
    )


def _packed(*modules: nn.Linear, gated: bool = False) -> PackedLinear:
    return PackedLinear([module.weight for module in modules], [module.bias for module in modules], gated=gated)


def _weight_of(module: Any) -> Any:
    return None if module is None else module.weight.detach().contiguous()


def _is_packable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not serves(module.weight):
        return False
    return module.weight.dtype == torch.float32 or module.in_features % 2 == 0  # bfloat16 is read in pairs
