"""Exact attention of whole sequences, in the layouts of attention plans."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.kernels.exact import exact_attention, recomputed
from hybridflow.models.kernels.library import serves


def attend_exactly(
    attend: Callable[..., Tensor],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: AttentionForm,
    families: Sequence[Sequence[int]],
) -> Tensor:
    """Compute what the plan's `attend` does, with the bits of decoding; `families` as in `causal_attention`.

    On a GPU the gradient is that of `attend` without exact bits.
    """

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        return exact_attention(q, k, v, families, form.scaling).unflatten(0, (len(query), -1))

    if serves(query):
        return compute(query, key, value)
    return recomputed(compute, query, key, value, reference=partial(attend, layer, form=replace(form, exact=False)))
