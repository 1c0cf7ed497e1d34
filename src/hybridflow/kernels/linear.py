"""Linear layers on weights that lie in the order in which a product of few rows reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.errors import ModelError
from hybridflow.kernels.library import call


class PackedLinear:
    """The linear layers of one input, side by side: x (rows, in) -> (rows, sum of outs).

    `gated`: two layers of equal size, a gate and its factor; the output is silu(gate) * factor, (rows, out).
    Only for weights (out, in) that `serves` approves; in bfloat16 `in` is even. `weight` and `bias` are copies. Raises
    ModelError for other weights, and for inputs of another shape or dtype.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, gated: bool = False) -> None:
        joined = torch.cat([weight.detach() for weight in weights]).contiguous()
        self.out_features, self.in_features = joined.shape[0] // (1 + gated), joined.shape[1]
        if joined.dtype == torch.bfloat16 and self.in_features % 2:
            raise ModelError(f"a bfloat16 weight has {self.in_features} inputs; packed ones need an even number.")
        self.gated = gated
        self.bias = None
        if any(bias is not None for bias in biases):
            parts = [w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
            self.bias = torch.cat(parts).contiguous()
        sizes = (self.out_features, self.in_features, int(gated))
        self.weight = joined.new_empty(call("packed_size", joined.dtype, *sizes))
        call("pack_weight", joined.dtype, joined, self.weight, *sizes)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The product, added to the residual (rows, out) if one is given; no gradient."""
        if x.dtype != self.weight.dtype or x.dim() != 2 or x.shape[1] != self.in_features:
            wanted = f"(rows, {self.in_features}) of {self.weight.dtype}"
            raise ModelError(f"the input is {tuple(x.shape)} of {x.dtype}; this layer takes {wanted}.")
        x, residual = x.contiguous(), None if residual is None or self.gated else residual.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=x.dtype)
        sizes = (len(x), self.in_features, self.out_features, int(self.gated))
        call("linear", x.dtype, x, self.weight, self.bias, residual, out, *sizes)
        return out
