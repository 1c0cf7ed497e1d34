"""What is known per model family: loading, heads, attention."""

from hybridflow.models.attention import AttentionPlan, PackedPlan, PaddedPlan
from hybridflow.models.forward import Forward, forward_of
from hybridflow.models.loading import DTYPES, load_causal_lm, load_value_model
from hybridflow.models.shared_prompts import SharedPromptPlan, sharing_pays

__all__ = [
    "DTYPES",
    "AttentionPlan",
    "Forward",
    "PackedPlan",
    "PaddedPlan",
    "SharedPromptPlan",
    "forward_of",
    "load_causal_lm",
    "load_value_model",
    "sharing_pays",
]
