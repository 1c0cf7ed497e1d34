"""Generation with vLLM, in the process of the rank. Nothing else of hybridflow knows vLLM."""

from hybridflow.rollout.vllm.engine import VLLMRollout
from hybridflow.rollout.vllm.versions import require_vllm

__all__ = ["VLLMRollout", "require_vllm"]
