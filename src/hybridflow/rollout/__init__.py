"""Rollout engines: the request-level Protocol, the embedded engine, and vLLM (`hybridflow.rollout.vllm`)."""

from hybridflow.rollout.base import (
    Completion,
    FinishReason,
    Request,
    RolloutEngine,
    SamplingParams,
)
from hybridflow.rollout.embedded import EmbeddedRollout
from hybridflow.rollout.loading import load_weights
from hybridflow.rollout.running_groups import RunningGroups, generate

__all__ = [
    "Completion",
    "EmbeddedRollout",
    "FinishReason",
    "Request",
    "RolloutEngine",
    "RunningGroups",
    "SamplingParams",
    "generate",
    "load_weights",
]
