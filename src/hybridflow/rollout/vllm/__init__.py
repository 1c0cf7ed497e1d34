"""Generation with vLLM, in the process of the rank. No other package of hybridflow imports vLLM."""

from hybridflow.rollout.vllm.engine import VLLMRollout
from hybridflow.rollout.vllm.process import require_vllm

__all__ = ["VLLMRollout", "require_vllm"]
