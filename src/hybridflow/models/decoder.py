"""The compiled decoder of a model of a fused family: its weights, copied into the layout that decoding reads."""

from typing import Any

import torch
from torch import nn

from hybridflow.kernels import Decoder, DecoderLayer, PackedLinear, serves


def decoder_of(body: Any, head: Any, epsilon: float) -> Decoder | None:
    """Build the compiled decoder; None if no kernel supports the model, or it has adapters, whose modules must run."""
    products = [module for layer in body.layers for name, module in layer.named_modules() if name.endswith("_proj")]
    if type(body.embed_tokens) is not nn.Embedding or not all(_is_packable(module) for module in [*products, head]):
        return None
    attention = body.layers[0].self_attn
    return Decoder(
        body.embed_tokens.weight.detach().contiguous(),
        [_layer(layer) for layer in body.layers],
        _norm(body.norm),
        _packed(head),
        heads=attention.q_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        epsilon=epsilon,
        scaling=attention.scaling,
    )


def _layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        norm=_norm(layer.input_layernorm),
        qkv=_packed(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=_norm(getattr(attention, "q_norm", None)),
        key_norm=_norm(getattr(attention, "k_norm", None)),
        out=_packed(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_packed(mlp.gate_proj, mlp.up_proj, gated=True),
        down=_packed(mlp.down_proj),
    )


def _packed(*modules: nn.Linear, gated: bool = False) -> PackedLinear:
    return PackedLinear([module.weight for module in modules], [module.bias for module in modules], gated=gated)


def _norm(module: Any) -> Any:
    return None if module is None else module.weight.detach().contiguous()


def _is_packable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not serves(module.weight):
        return False
    return module.weight.dtype == torch.float32 or module.in_features % 2 == 0  # bfloat16 is read in pairs
