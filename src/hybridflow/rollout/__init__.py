"""Rollout engines: the request-level Protocol, the embedded engine, and vLLM (`hybridflow.rollout.vllm`)."""

from hybridflow.rollout.base import (
    Completion,
    FinishReason,
    Request,
    RolloutEngine,
    SamplingParams,
    generate,
    load_weights,
)
from hybridflow.rollout.embedded import EmbeddedRollout

__all__ = [
    "Completion",
    "EmbeddedRollout",
    "FinishReason",
    "Request",
    "RolloutEngine",
    "SamplingParams",
    "generate",
    "load_weights",
]
