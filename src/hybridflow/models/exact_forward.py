"""The fused forward pass with exact log-probs: a token's results have the same bits in each batch and layout."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridflow.errors import ModelConfigError
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.fused_forward import FusedForward, is_fusable
from hybridflow.models.kernels.elementwise import WIDEST
from hybridflow.models.kernels.exact import exact_linear, recomputed, serves_exactly
from hybridflow.models.kernels.library import serves
from hybridflow.models.kernels.paged_attention import LARGEST_HEAD_BYTES
from hybridflow.models.support import FUSED_FAMILIES
from hybridflow.models.tensor_parallel import TensorRanks
from hybridflow.runtime.boxes import local


class ExactForward(FusedForward):
    """The fused forward pass, each operation of which adds in the order of decoding; see `require_exact`."""

    is_exact = True

    def compile(self) -> None:
        """Raise ModelConfigError: compiled layers add in another order."""
        raise ModelConfigError("rollout.exact=true computes layers by its own kernels; set model.compile = false.")

    def _form(self, scaling: float) -> AttentionForm:
        return AttentionForm(scaling, exact=True)

    def _apply(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return function(*arguments) if serves(arguments[0]) else recomputed(function, *arguments)

    def _linear(self, module: Any, x: Tensor) -> Tensor:
        return _linear(module, x)

    def _add_linear(self, residual: Tensor, x: Tensor, module: Any) -> Tensor:
        return _linear(module, x, residual)


def require_exact(model: PreTrainedModel, tensor: TensorRanks | None) -> None:
    """Raise ModelConfigError, with the reason, if a model's tokens cannot have the same bits in each batch."""
    like: Any = local(model.get_input_embeddings().weight)  # pyright: ignore
    products: list[Any] = [module for name, module in model.named_modules() if name.endswith("_proj")]
    kind = model.config.model_type
    unlike = " with windows, such rotary angles (rope_parameters) or hidden_act" if kind in FUSED_FAMILIES else ""
    odd = "a layer has an odd number of inputs, which model.dtype='float32' takes, and bfloat16 does not"
    kernels = "compiled kernels serve" if like.device.type == "cpu" else "kernels of Triton serve"
    needed = "controller.compiled_kernels=true and a C compiler" if like.device.type == "cpu" else "the package triton"
    dtypes = f"it needs float32 or bfloat16, and {needed}"
    problem = (
        (not serves_exactly(like) and f"no {kernels} {like.dtype} on {like.device.type}; {dtypes}")
        or (
            not is_fusable(model) and f"'{kind}' models{unlike} have no fused forward pass; Llama, Qwen2 and Qwen3 have"
        )
        or (tensor is not None and "tensor parallel ranks add in another order; set parallel.tensor=1")
        or (any(type(m) is not nn.Linear for m in products) and "training computes adapters apart; set lora.rank=0")
        or (serves(like) and like.dtype == torch.bfloat16 and any(m.in_features % 2 for m in products) and odd)
        or (not serves(like) and _is_wide(model, like) and "heads or layers are too wide for the kernels of Triton")
    )
    if problem:
        raise ModelConfigError(f"rollout.exact=true is not possible: {problem}; or use rollout.exact=false.")


def _is_wide(model: Any, like: Tensor) -> bool:
    """Return whether kernels that hold a head, or a row of the norm, have no room for it."""
    return model.model.layers[0].self_attn.head_dim * like.element_size() > LARGEST_HEAD_BYTES or like.shape[1] > WIDEST


def _linear(module: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Compute a linear layer as decoding does."""
    return exact_linear(x, local(module.weight), None if module.bias is None else local(module.bias), residual)
