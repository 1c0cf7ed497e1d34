"""Generation with vLLM, in the process of the rank. Nothing else of hybridflow knows vLLM."""

from hybridflow.rollout.vllm.engine import VLLMRollout

__all__ = ["VLLMRollout"]
