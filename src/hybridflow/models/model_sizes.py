"""The sizes of a decoder, read without its weights, its floating-point operations, and their utilization (MFU).

FLOPs are counted as in Narayanan et al. 2021 and Chowdhery et al. 2022: without padding and recomputed activations, a
multiply-add as two, and a backward pass as two forward passes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from hybridflow.models.experts import sizes_of_experts
from hybridflow.models.loading import build_without_weights, model_config
from hybridflow.models.support import FUSED_FAMILIES


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder-only transformer. `head_dim` 0 means hidden_size / num_heads.

    Of a mixture of experts, `intermediate_size` is the width of the experts that compute a token, with shared ones,
    the mean of the layers, and `matrix_weights` is the number of weights in matrix products of a token; of a dense
    model it is 0, because the number follows from the sizes.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int = 0
    gated_mlp: bool = True
    experts_per_token: int = 0
    matrix_weights: int = 0

    @property
    def attention_size(self) -> int:
        """Total width of all query heads."""
        return self.num_heads * (self.head_dim or self.hidden_size // self.num_heads)

    @property
    def num_matrix_weights(self) -> int:
        """Number of weights in matrix products of a token: projections, MLP and lm head, not embeddings and norms."""
        if self.matrix_weights:
            return self.matrix_weights
        kv_size = self.attention_size * self.num_key_value_heads // self.num_heads
        attention = 2 * self.hidden_size * (self.attention_size + kv_size)
        mlp = (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size


def decoder_shape(model_path: str | Path, *, has_lm_head: bool = True) -> DecoderShape | None:
    """Read the sizes from a model directory; None if its configuration lacks them.

    Raises ModelError if the configuration cannot be read or is unsupported.
    """
    config = model_config(model_path)
    try:
        shape = DecoderShape(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            vocab_size=config.vocab_size if has_lm_head else 1,
            head_dim=getattr(config, "head_dim", None) or 0,
        )
    except AttributeError:
        return None
    if not sizes_of_experts(config):
        return shape
    model = build_without_weights(model_path, "policy" if has_lm_head else "value", torch.float32)
    return shape_of_mixture(shape, model)


def shape_of_mixture(shape: DecoderShape, model: PreTrainedModel) -> DecoderShape:
    """Return the shape with the sizes of a mixture of experts, counted on its parameters, which need no memory."""
    sizes = sizes_of_experts(model.config)
    if sizes is None:
        return shape
    chosen, experts = sizes
    in_layers = mlp = 0
    for name, parameter in model.named_parameters():
        if ".layers." not in name or parameter.ndim < 2:
            continue
        is_stack = parameter.ndim == 3 and len(parameter) == experts
        is_router_or_bias = len(parameter) in (1, experts) and not is_stack
        count = parameter.numel() * chosen // experts if is_stack else parameter.numel()
        in_layers += 0 if name.endswith("bias") else count
        mlp += 0 if is_router_or_bias or "attn" in name else count
    latent = [getattr(model.config, f"{part}_head_dim", None) or 0 for part in ("qk_nope", "qk_rope", "v")]
    return replace(
        shape,
        intermediate_size=mlp // (3 * shape.hidden_size * shape.num_layers),
        head_dim=sum(latent) // 2 if all(latent) else shape.head_dim,  # half of that of scores and of values together
        experts_per_token=chosen,
        matrix_weights=in_layers + shape.hidden_size * shape.vocab_size,
    )


def flops_per_token(shape: DecoderShape, context_len: float) -> float:
    """Return the forward FLOPs of one token that attends to `context_len` tokens, itself included."""
    return 2.0 * shape.num_matrix_weights + 4.0 * shape.num_layers * shape.attention_size * context_len


def forward_flops(shape: DecoderShape, sequence_lens: Iterable[int]) -> float:
    """Return the forward FLOPs of whole sequences under causal attention: token i attends to i tokens."""
    return sum(length * flops_per_token(shape, (length + 1) / 2) for length in sequence_lens)


def sequence_costs(shape: DecoderShape | None, sequence_lens: Iterable[int]) -> list[float]:
    """Return the relative cost of each sequence: its forward FLOPs, or its length if the shape is unknown."""
    return [float(length) if shape is None else forward_flops(shape, [length]) for length in sequence_lens]


def generation_flops(
    shape: DecoderShape,
    prompt_lens: Iterable[int],
    sequence_lens: Iterable[int],
    prompt_lens_of_sequences: Iterable[int],
) -> float:
    """Return the FLOPs of generation: each prompt is computed once, and each sequence continues from its prompt.

    `prompt_lens` has one entry per prompt; `sequence_lens` and `prompt_lens_of_sequences` have one per sequence.
    """
    repeated = forward_flops(shape, sequence_lens) - forward_flops(shape, prompt_lens_of_sequences)
    return forward_flops(shape, prompt_lens) + repeated


def training_flops(shape: DecoderShape, sequence_lens: Iterable[int]) -> float:
    """Return the FLOPs of a forward and a backward pass."""
    return 3.0 * forward_flops(shape, sequence_lens)


def mfu(flops: float, seconds: float, peak_flops: float) -> float:
    """Return the model FLOPs utilization, a share of `peak_flops` (per second); 0 if nothing was measured."""
    return flops / (seconds * peak_flops) if seconds > 0 and peak_flops > 0 else 0.0


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder, and its numbers of parameters: of one layer, the embedding, and a head of its own.

    `head` is 0 if the head is tied to the embedding. `normalizes_heads`: queries and keys have norms, as in Qwen3. If
    the layers of a mixture differ, `layer` is the largest, and `all_layers` not 0 but the number of all of them.
    """

    shape: DecoderShape
    layer: int
    embedding: int
    head: int
    normalizes_heads: bool = False
    all_layers: int = 0

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        in_layers = self.all_layers or self.shape.num_layers * self.layer
        return in_layers + self.embedding + self.head + self.shape.hidden_size

    @property
    def kv_size(self) -> int:
        """Total width of all key heads, which is that of all value heads."""
        return self.shape.attention_size * self.shape.num_key_value_heads // self.shape.num_heads


def model_sizes(path: str | Path, head: Literal["policy", "value"] = "policy") -> ModelSizes | None:
    """Read the sizes of a model directory, without its weights; None for other dense models than the fused families.

    Raises ModelError if the configuration cannot be read or is unsupported.
    """
    shape = decoder_shape(path, has_lm_head=head == "policy")
    model = build_without_weights(path, head, torch.float32)
    if shape is None or not (model.config.model_type in FUSED_FAMILIES or shape.experts_per_token):
        return None
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = [
        sum(count for name, count in counts.items() if f".layers.{index}." in name) for index in range(shape.num_layers)
    ]
    return ModelSizes(
        shape=shape,
        layer=max(layers),
        embedding=sum(count for name, count in counts.items() if "embed_tokens" in name),
        head=sum(count for name, count in counts.items() if name.startswith(("lm_head.", "score."))),
        normalizes_heads=any("q_norm" in name for name in counts),
        all_layers=sum(layers) if len(set(layers)) > 1 else 0,
    )
