"""What vLLM, version 0.32, needs to compute some families of models as the trainer does, or beside it."""

# pyright: reportMissingImports=false

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoModel, PretrainedConfig

ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers, in `layer_types` of configurations, that have keys and values instead of a state."""


def caches_prompts(config: PretrainedConfig, on_gpu: bool) -> bool | None:
    """Return whether the engine has a prefix cache; None: as vLLM chooses.

    vLLM caches states only of prompts in chunks, which engines on a CPU do not have, see `engine_arguments`.
    """
    return False if not on_gpu and set(getattr(config, "layer_types", None) or ()) - ATTENTION else None


def changed_config(config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of a configuration that vLLM reads otherwise than transformers: it adds a token to a window."""
    window = getattr(config, "sliding_window", None)
    return {"sliding_window": window - 1} if config.model_type == "cohere2" and window else {}


@contextmanager
def separate_model_code(config: PretrainedConfig, on_gpu: bool) -> Iterator[None]:
    """Let vLLM build a model whose code is not that of training's models, and is right on a CPU."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models import ModelRegistry

    known: Any = AutoModel._model_mapping  # pyright: ignore[reportAttributeAccessIssue]
    kind, kernel = type(config), RotaryEmbedding.forward_cpu
    if kind in known:  # vLLM computes some families with the classes of transformers, which it changes in place
        ours = known[kind]
        AutoModel.register(kind, type(ours.__name__, (ours,), {"__module__": ours.__module__}), exist_ok=True)
    if not on_gpu:
        RotaryEmbedding.forward_cpu = _rotated_by_token(kernel)  # a layer keeps the function that it is built with
    try:
        yield
    except ValueError as error:
        if "failed to be inspected" in str(error):  # which vLLM does in another process
            for name in config.architectures or ():
                ModelRegistry.models[name].load_model_cls()
        raise
    finally:
        RotaryEmbedding.forward_cpu = kernel
        known._extra_content.pop(kind, None)


def require_windows(vllm_config: Any) -> None:
    """Raise ValueError if vLLM's code of a model ignores windows that sequences may exceed."""
    config, longest = vllm_config.model_config.hf_text_config, vllm_config.model_config.max_model_len
    layers = vllm_config.compilation_config.static_forward_context.values()
    is_windowed = any("sliding" in kind for kind in getattr(config, "layer_types", None) or ())
    window = is_windowed and getattr(config, "sliding_window", None)
    if window and longest > window and not any(getattr(layer, "sliding_window", None) for layer in layers):
        raise ValueError(f"vLLM ignores its sliding windows; set rollout.max_model_len = {window}")


def renew_tied_head(model: Any, config: Any) -> None:
    """Renew the packed copy of the embedding's weights in a tied output head.

    A tied head receives no weights, so that vLLM does not renew the packed copy that it multiplies by on a CPU.
    """
    head = getattr(model, "lm_head", None)
    if getattr(config.hf_text_config, "tie_word_embeddings", False) and head is not None:
        head.quant_method.process_weights_after_loading(head)


def pack_experts(model: Any, config: Any) -> None:
    """Pack the experts' weights into the layout of a CPU's kernel, which vLLM does for the first weights only."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def _rotated_by_token(kernel: Any) -> Any:
    """Return vLLM's kernel of rotary positions for CPUs, also for queries of (tokens, heads, head_dim).

    The kernel takes the distance of two heads for that of two tokens.
    """

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, ...]:
        by_token = [x if x is None or x.ndim < 3 else x.reshape(len(x), -1) for x in (query, key)]
        rotated = kernel(self, positions, *by_token)
        return tuple(x if x is None else x.view(like.shape) for x, like in zip(rotated, (query, key), strict=True))

    return forward_cpu
