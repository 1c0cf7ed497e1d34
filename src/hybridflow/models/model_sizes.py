"""The sizes of a decoder, read without its weights, its floating-point operations, and their utilization (MFU).

FLOPs are counted as in Narayanan et al. 2021 and Chowdhery et al. 2022: without padding and recomputed activations, a
multiply-add as two, and a backward pass as two forward passes. Weights in products are those of the model on the meta
device; windows, heads and states are those that its code uses (`layer_pass`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridflow.models.experts import experts_of, sizes_of_experts
from hybridflow.models.layer_pass import LayerBytes, SeeingPlan, bytes_of_layers, see_layers
from hybridflow.models.loading import HEADS, build_without_weights, model_config
from hybridflow.models.parameters import layers_of
from hybridflow.models.support import is_plain_decoder


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder-only transformer. `head_dim` 0 means hidden_size / num_heads.

    `matrix_weights` is the number of weights in matrix products of a token; 0: it follows from the sizes, as in Llama.
    Of a mixture of experts it counts the experts that compute a token, and `intermediate_size` is their width, with
    shared ones, the mean of the layers. `windows`: tokens that a query sees, itself included, of each layer with
    attention, 0 for all of them; None: all layers have attention, without windows. `state_size`: numbers of a
    sequence's recurrent states, in all layers.
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
    windows: tuple[int, ...] | None = None
    state_size: int = 0

    @property
    def attention_size(self) -> int:
        """Total width of all query heads."""
        return self.num_heads * (self.head_dim or self.hidden_size // self.num_heads)

    @property
    def num_matrix_weights(self) -> int:
        """Number of weights in matrix products of a token: projections, MLP and lm head, not embeddings and norms."""
        if self.matrix_weights:
            return self.matrix_weights + self.hidden_size * self.vocab_size
        kv_size = self.attention_size * self.num_key_value_heads // self.num_heads
        attention = 2 * self.hidden_size * (self.attention_size + kv_size)
        mlp = (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size

    def attended(self, context_len: float) -> float:
        """Return the tokens to which one with this context attends, in all layers together."""
        if self.windows is None:
            return self.num_layers * context_len
        return sum(min(context_len, window or context_len) for window in self.windows)


def decoder_shape(model_path: str | Path, *, has_lm_head: bool = True) -> DecoderShape | None:
    """Read the sizes from a model directory; None if its configuration lacks them.

    Raises ModelError if the configuration cannot be read or is unsupported.
    """
    config = model_config(model_path)
    if (shape := _by_config(config, has_lm_head=has_lm_head)) is None or is_plain_decoder(config):
        return shape
    model = build_without_weights(model_path, "policy" if has_lm_head else "value", torch.float32)
    return shape_of_model(shape, model, see_layers(model))


def _by_config(config: PretrainedConfig, *, has_lm_head: bool) -> DecoderShape | None:
    """Return the sizes that the configuration of a text model has names for."""
    text = config.get_text_config()
    try:
        return DecoderShape(
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            intermediate_size=getattr(text, "intermediate_size", 0),
            num_heads=text.num_attention_heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            vocab_size=text.vocab_size if has_lm_head else 1,
            head_dim=getattr(text, "head_dim", None) or 0,
        )
    except AttributeError:
        return None


def shape_of_model(shape: DecoderShape, model: PreTrainedModel, seen: SeeingPlan | None) -> DecoderShape:
    """Return the shape with the weights that its parameters are, and what its layers were `seen` to use, if any."""
    chosen, experts = sizes_of_experts(model.config) or (0, 0)
    in_layers = mlp = 0
    for layer in layers_of(model):
        for name, parameter in layer.named_parameters():
            if parameter.ndim < 2:
                continue
            is_stack = bool(experts) and parameter.ndim == 3 and len(parameter) == experts
            is_router_or_bias = len(parameter) in (1, experts) and not is_stack
            count = parameter.numel() * chosen // experts if is_stack else parameter.numel()
            in_layers += 0 if name.endswith("bias") else count
            mlp += 0 if is_router_or_bias or "attn" in name else count
    counted = replace(
        shape,
        intermediate_size=mlp // (3 * shape.hidden_size * shape.num_layers),
        experts_per_token=chosen,
        matrix_weights=in_layers,
    )
    if seen is None or not seen.attention:
        return counted
    layers = [seen.attention[layer] for layer in sorted(seen.attention)]
    return replace(
        counted,
        num_heads=layers[0].heads,
        num_key_value_heads=layers[0].kv_heads,
        head_dim=(layers[0].key_width + layers[0].value_width) // 2,
        windows=tuple(layer.form.window or 0 for layer in layers),
        state_size=seen.state_size,
    )


def flops_per_token(shape: DecoderShape, context_len: float) -> float:
    """Return the forward FLOPs of one token that attends to `context_len` tokens, itself included.

    In a layer with a window it attends to that many at most. A recurrent layer takes 6 FLOPs for each number of its
    state, however long the context is: it reads the state by the key, adds the outer product of key and value, and
    reads it by the query, as the gated delta rule does token by token (Yang et al., 2024, Gated Delta Networks). Decays
    are left out, and what kernels compute beside it in chunks of tokens. Mamba reads once, so it is counted too high.
    """
    in_attention = 4.0 * shape.attention_size * shape.attended(context_len)
    return 2.0 * shape.num_matrix_weights + in_attention + 6.0 * shape.state_size


def forward_flops(shape: DecoderShape, sequence_lens: Iterable[int]) -> float:
    """Return the forward FLOPs of whole sequences under causal attention: token i attends to i tokens.

    In a layer with a window token i attends to min(i, window) tokens.
    """
    windows = sorted({window for window in shape.windows or () if window})

    def flops(length: int) -> float:  # between the ends of windows, the FLOPs of a token grow linearly
        ends = [window for window in windows if window < length]
        starts = [0, *ends]
        return sum(
            (end - start) * flops_per_token(shape, (start + 1 + end) / 2)
            for start, end in zip(starts, [*ends, length], strict=True)
        )

    return sum(flops(length) for length in sequence_lens)


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
    layers differ, `layer` is the largest, and `all_layers` not 0 but the number of all of them. `rest`: parameters
    besides these and the last norm. `layers`: the bytes of each layer; () for the fused pass. `largest`: the largest
    weight of a layer; 0: one of its MLP. `experts`: parameters in the experts of a layer. `state_bytes`: of the states
    of a sequence, in all recurrent layers.
    """

    shape: DecoderShape
    layer: int
    embedding: int
    head: int
    normalizes_heads: bool = False
    all_layers: int = 0
    rest: int = 0
    layers: tuple[LayerBytes, ...] = ()
    largest: int = 0
    experts: int = 0
    state_bytes: int = 0

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        in_layers = self.all_layers or self.shape.num_layers * self.layer
        return in_layers + self.embedding + self.head + self.shape.hidden_size + self.rest

    @property
    def kv_size(self) -> int:
        """Total width of all key heads, which is that of all value heads."""
        return self.shape.attention_size * self.shape.num_key_value_heads // self.shape.num_heads


def model_sizes(
    path: str | Path,
    head: Literal["policy", "value"] = "policy",
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_frozen: bool = False,
) -> ModelSizes | None:
    """Read the sizes of a model directory, without its weights.

    `dtype`: that of its computation. `is_frozen`: only adapters learn, so that inputs of weights are not kept. None if
    the code needs the values of tensors, so that its layers cannot be seen without them. Raises ModelError if the
    configuration cannot be read or is unsupported.
    """
    model = build_without_weights(path, head, dtype)
    model.requires_grad_(not is_frozen)
    shape = _by_config(model.config, has_lm_head=head == "policy")
    is_plain = is_plain_decoder(model.config)
    seen = SeeingPlan() if is_plain else see_layers(model)
    if shape is None or seen is None:
        return None
    of_layers = [_numbers(layer) for layer in layers_of(model)]
    embedding, own_head = _numbers(model.get_input_embeddings()), _head_size(model)
    layers = sum(of_layers)
    return ModelSizes(
        shape=shape if is_plain else shape_of_model(shape, model, seen),
        layer=max(of_layers),
        embedding=embedding,
        head=own_head,
        normalizes_heads=any("q_norm" in name for name, _ in model.named_parameters()),
        all_layers=layers if len(set(of_layers)) > 1 else 0,
        rest=_numbers(model) - layers - embedding - own_head - shape.hidden_size,
        layers=() if is_plain else bytes_of_layers(model),
        largest=max(parameter.numel() for layer in layers_of(model) for parameter in layer.parameters()),
        experts=max((_numbers(experts) for experts in experts_of(model)), default=0),
        state_bytes=seen.state_bytes,
    )


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _head_size(model: PreTrainedModel) -> int:
    """Return the number of parameters of a head that is not the embedding."""
    embedding = model.get_input_embeddings().weight
    heads = (child for name, child in model.named_children() if f"{name}." in HEADS)
    return sum(parameter.numel() for head in heads for parameter in head.parameters() if parameter is not embedding)
