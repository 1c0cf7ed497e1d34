"""Linear layers on packed weights, in the memory order of a product with few rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.errors import ModelError
from hybridflow.kernels.library import call


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
