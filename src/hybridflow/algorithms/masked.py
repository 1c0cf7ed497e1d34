"""Statistics over the values where a mask is true.

Masked values, including NaN and infinity, have no effect: they are replaced, not multiplied by zero. `values` may have
axes of size 1 where the mask is wider (one advantage for each row).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_mask
from hybridflow.errors import AlgorithmError

WHITEN_EPSILON = 1e-8
"""Added to the variance in `masked_whiten`."""


def masked_sum(values: Float[Tensor, "*#shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the sum of the values where the mask is true; 0 if all are masked."""
    return torch.where(mask, _over_mask("masked_sum", values, mask), 0.0).sum()


def masked_mean(
    values: Float[Tensor, "*#shape"], mask: Bool[Tensor, "*shape"], *, dim: int | None = None
) -> Float[Tensor, "..."]:
    """Return the mean of the values where the mask is true, over all axes or along one; 0 if all are masked."""
    kept = torch.where(mask, _over_mask("masked_mean", values, mask), 0.0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_var(values: Float[Tensor, "*#shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the variance of all values where the mask is true.

    Sum of squared deviations over (n - 1); 0 for fewer than two values.
    """
    deviations = _over_mask("masked_var", values, mask) - masked_mean(values, mask)
    return masked_sum(deviations.square(), mask) / (mask.sum() - 1).clamp(min=1)


def masked_whiten(values: Float[Tensor, "*#shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Shift and scale to mean 0 and (unbiased) variance 1 over the mask; exactly 0 where masked.

    (x - mean) / sqrt(var + 1e-8). Without variance (one value, or equal ones) the values are 0 to rounding; a fully
    masked tensor gives zeros.
    """
    values = _over_mask("masked_whiten", values, mask)
    whitened = (values - masked_mean(values, mask)) * torch.rsqrt(masked_var(values, mask) + WHITEN_EPSILON)
    return torch.where(mask, whitened, 0.0)


def _over_mask(function: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return the values expanded to the shape of the mask."""
    if not values.is_floating_point():
        raise AlgorithmError(f"{function}: values is {values.dtype}; it must be floating point, call .float().")
    fits = values.dim() == mask.dim() and all(
        size in (1, wanted) for size, wanted in zip(values.shape, mask.shape, strict=True)
    )
    require_mask(function, "mask", mask, tuple(mask.shape) if fits else tuple(values.shape), like="values")
    return values.expand(mask.shape)
