"""What is known per model family: loading, heads, attention."""

from hybridflow.models.attention import AttentionPlan, PackedPlan, PaddedPlan
from hybridflow.models.loading import DTYPES, load_causal_lm, load_value_model

__all__ = ["DTYPES", "AttentionPlan", "PackedPlan", "PaddedPlan", "load_causal_lm", "load_value_model"]
