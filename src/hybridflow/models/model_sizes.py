"""The sizes of a model directory, read without its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hybridflow.models.flops import DecoderShape, decoder_shape
from hybridflow.models.sharded_loading import build_without_weights
from hybridflow.models.support import FUSED_FAMILIES


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder, and its numbers of parameters: of one layer, the embedding, and a head of its own.

    `head` is 0 if the head is tied to the embedding. `normalizes_heads`: queries and keys have norms, as in Qwen3.
    """

    shape: DecoderShape
    layer: int
    embedding: int
    head: int
    normalizes_heads: bool = False

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.shape.num_layers * self.layer + self.embedding + self.head + self.shape.hidden_size

    @property
    def kv_size(self) -> int:
        """Total width of all key heads, which is that of all value heads."""
        return self.shape.attention_size * self.shape.num_key_value_heads // self.shape.num_heads


def model_sizes(path: str | Path, head: Literal["policy", "value"] = "policy") -> ModelSizes | None:
    """Read the sizes of a model directory, without its weights; None if its family has no fused forward pass.

    Raises ModelError if the configuration cannot be read or is unsupported.
    """
    shape = decoder_shape(path, has_lm_head=head == "policy")
    model = build_without_weights(path, head, torch.float32)
    if shape is None or model.config.model_type not in FUSED_FAMILIES:
        return None
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return ModelSizes(
        shape=shape,
        layer=sum(count for name, count in counts.items() if ".layers.0." in name),
        embedding=sum(count for name, count in counts.items() if "embed_tokens" in name),
        head=sum(count for name, count in counts.items() if name.startswith(("lm_head.", "score."))),
        normalizes_heads=any("q_norm" in name for name in counts),
    )
