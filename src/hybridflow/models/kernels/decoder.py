"""A compiled decoder: one more token for each row in a single call, without Python overhead between its steps.

Its weights are packed in the memory order of a product with few rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.errors import ModelError
from hybridflow.models.kernels.library import call


class PackedLinear:
    """Linear layers of one input, concatenated: x (rows, in) -> (rows, sum of outs).

    `gated`: two layers of equal size, a gate and its factor; the output is silu(gate) * factor, (rows, out).
    Requires weights (out, in) for which `serves` is true; in bfloat16 `in` must be even. `weight` and `bias` are
    copies. Raises ModelError for other weights, and for inputs of a wrong shape or dtype.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, gated: bool = False) -> None:
        joined = torch.cat([weight.detach() for weight in weights]).contiguous()
        self.out_features, self.in_features = joined.shape[0] // (1 + gated), joined.shape[1]
        if joined.dtype == torch.bfloat16 and self.in_features % 2:
            raise ModelError(
                f"a bfloat16 weight with {self.in_features} inputs cannot be packed: expected an even number."
            )
        self.gated = gated
        self.bias = None
        if any(bias is not None for bias in biases):
            parts = [w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
            self.bias = torch.cat(parts).contiguous()
        sizes = (self.out_features, self.in_features, int(gated))
        self.weight = joined.new_empty(call("packed_size", joined.dtype, *sizes))
        call("pack_weight", joined.dtype, joined, self.weight, *sizes)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the product, plus the residual (rows, out) if given, which gated layers ignore; no gradient."""
        if x.dtype != self.weight.dtype or x.dim() != 2 or x.shape[1] != self.in_features:
            expected = f"(rows, {self.in_features}) of {self.weight.dtype}"
            raise ModelError(f"the input has shape {tuple(x.shape)} of {x.dtype}: expected {expected}.")
        x, residual = x.contiguous(), None if residual is None or self.gated else residual.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=x.dtype)
        sizes = (len(x), self.in_features, self.out_features, int(self.gated))
        call("linear", x.dtype, x, self.weight, self.bias, residual, out, *sizes)
        return out


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one pre-norm layer: attention with rotary embedding, then a gated MLP.

    `qkv` computes queries, keys and values; the norms of heads (head_dim,) are None if the family has none.
    """

    norm: Tensor
    qkv: PackedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors in the order of the C struct."""
        return [
            *(self.norm, self.qkv.weight, self.qkv.bias, self.query_norm, self.key_norm, self.out.weight),
            *(self.out.bias, self.mlp_norm, self.gate_up.weight, self.gate_up.bias, self.down.weight, self.down.bias),
        ]


class Decoder:
    """The packed weights of a decoder, of one dtype; `embedding` (vocabulary, width), `heads` counts query heads.

    Each step rounds to the dtype as the same step in PyTorch does.
    """

    def __init__(
        self,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        head: PackedLinear,
        *,
        heads: int,
        head_dim: int,
        epsilon: float,
        scaling: float,
    ) -> None:
        self.layers, self.head, self.heads, self.head_dim = list(layers), head, heads, head_dim
        self.epsilon, self.scaling = float(epsilon), float(scaling)
        self._tensors = [tensor for layer in layers for tensor in layer.tensors()]  # kept alive for their addresses
        self._layers = _addresses(self._tensors)
        self._outer = (embedding, norm, head.weight, head.bias)
        qkv, mlp, self._vocabulary = layers[0].qkv.out_features, layers[0].down.in_features, head.out_features
        width = head.in_features
        self.kv_heads = (qkv // head_dim - heads) // 2
        self._sizes = (len(layers), width, heads, self.kv_heads, head_dim, mlp, self._vocabulary)
        self._scratch_size = 2 * width + qkv + heads * head_dim + mlp

    def __call__(
        self,
        tokens: Tensor,
        ends: Tensor,
        longest: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Compute the logits (rows, vocabulary) that follow `tokens` (rows,), at positions `ends` (rows,).

        The keys and values of the tokens are added to the cache: one tensor per layer (at least rows, kv_heads,
        capacity, head_dim), contiguous, of which `ends` tokens per row, at most `longest`, are filled. cos and sin:
        (positions, head_dim / 2), float32.
        """
        rows, dtype = len(tokens), keys[0].dtype
        logits = torch.empty(rows, self._vocabulary, dtype=dtype)
        scratch = torch.empty(rows * self._scratch_size, dtype=dtype)
        tensors = (tokens.contiguous(), ends, self._layers, *self._outer, _addresses(keys), _addresses(values))
        sizes = (rows, *self._sizes, keys[0].shape[2], longest)
        call("decode", dtype, *tensors, cos, sin, scratch, logits, *sizes, self.epsilon, self.scaling)
        return logits


def _addresses(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.tensor([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
