"""What is known per model family: loading, heads, attention."""

from hybridflow.models.attention import AttentionPlan, PackedPlan, PaddedPlan
from hybridflow.models.forward import Forward, forward_of
from hybridflow.models.loading import DTYPES, load_causal_lm, load_value_model

__all__ = [
    "DTYPES",
    "AttentionPlan",
    "Forward",
    "PackedPlan",
    "PaddedPlan",
    "forward_of",
    "load_causal_lm",
    "load_value_model",
]
