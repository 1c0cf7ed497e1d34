"""Engines that generate: the request-level Protocol and the embedded engine."""

from hybridflow.rollout.base import Completion, FinishReason, Request, RolloutEngine, SamplingParams, generate
from hybridflow.rollout.embedded import EmbeddedRollout

__all__ = ["Completion", "EmbeddedRollout", "FinishReason", "Request", "RolloutEngine", "SamplingParams", "generate"]
