"""What is known per model family: loading, heads, attention."""

from hybridflow.models.attention import AttentionPlan, PackedPlan, PaddedPlan, WholePlan
from hybridflow.models.forward import Forward, forward_of, has_fused_forward
from hybridflow.models.loading import DTYPES, load_causal_lm, load_value_model
from hybridflow.models.sequence_parallel import GatherTokens, UlyssesPlan
from hybridflow.models.sharded_loading import build_with_placeholders, build_without_weights, load_shards, placeholder
from hybridflow.models.shared_prompts import SharedPromptPlan, sharing_pays
from hybridflow.models.tensor_parallel import TensorRanks, distribute_parameters, require_tensor_parallel

__all__ = [
    "DTYPES",
    "AttentionPlan",
    "Forward",
    "GatherTokens",
    "PackedPlan",
    "PaddedPlan",
    "SharedPromptPlan",
    "TensorRanks",
    "UlyssesPlan",
    "WholePlan",
    "build_with_placeholders",
    "build_without_weights",
    "distribute_parameters",
    "forward_of",
    "has_fused_forward",
    "load_causal_lm",
    "load_shards",
    "load_value_model",
    "placeholder",
    "require_tensor_parallel",
    "sharing_pays",
]
