"""Models: loading from a directory, heads, attention plans, the forward pass, and parallelism per model family."""

from hybridflow.models.attention import AttentionPlan, PackedPlan, PaddedPlan, WholePlan
from hybridflow.models.attention_backend import AttentionCase, AttentionName, attention_for
from hybridflow.models.forward import Forward, ReadLogits, max_logits_on
from hybridflow.models.fused_forward import FusedForward, forward_of
from hybridflow.models.loading import DTYPES, load_causal_lm, load_value_model, vocabulary_size
from hybridflow.models.lora import (
    add_adapters,
    fill_adapters,
    is_adapter,
    merged_weight,
    merged_weights,
    plain_name,
    without_adapters,
)
from hybridflow.models.memory import (
    MemoryLayout,
    RankMemory,
    forward_memory,
    generation_memory,
    training_memory,
)
from hybridflow.models.model_sizes import (
    DecoderShape,
    ModelSizes,
    decoder_shape,
    flops_per_token,
    forward_flops,
    generation_flops,
    mfu,
    model_sizes,
    sequence_costs,
    training_flops,
)
from hybridflow.models.sequence_parallel import GatherTokens, UlyssesPlan
from hybridflow.models.sharded_loading import (
    StoredModel,
    build_with_placeholders,
    build_without_weights,
    load_shards,
    parameters_on_meta,
    placeholder,
)
from hybridflow.models.shared_prompts import SharedPromptPlan, sharing_pays
from hybridflow.models.support import require_planned_attention
from hybridflow.models.tensor_parallel import TensorRanks, distribute_parameters, require_tensor_parallel

__all__ = [
    "DTYPES",
    "AttentionCase",
    "AttentionName",
    "AttentionPlan",
    "DecoderShape",
    "Forward",
    "FusedForward",
    "GatherTokens",
    "MemoryLayout",
    "ModelSizes",
    "PackedPlan",
    "PaddedPlan",
    "RankMemory",
    "ReadLogits",
    "SharedPromptPlan",
    "StoredModel",
    "TensorRanks",
    "UlyssesPlan",
    "WholePlan",
    "add_adapters",
    "attention_for",
    "build_with_placeholders",
    "build_without_weights",
    "decoder_shape",
    "distribute_parameters",
    "fill_adapters",
    "flops_per_token",
    "forward_flops",
    "forward_memory",
    "forward_of",
    "generation_flops",
    "generation_memory",
    "is_adapter",
    "load_causal_lm",
    "load_shards",
    "load_value_model",
    "max_logits_on",
    "merged_weight",
    "merged_weights",
    "mfu",
    "model_sizes",
    "parameters_on_meta",
    "placeholder",
    "plain_name",
    "require_planned_attention",
    "require_tensor_parallel",
    "sequence_costs",
    "sharing_pays",
    "training_flops",
    "training_memory",
    "vocabulary_size",
    "without_adapters",
]
