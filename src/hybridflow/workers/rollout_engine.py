"""Construction of the rollout engine from the configuration."""

import json
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.config import Config
from hybridflow.rollout import EmbeddedRollout, RolloutEngine


def build_rollout_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel | None = None,
    *,
    shares_model: bool = False,
    in_group: bool = False,
) -> RolloutEngine:
    """Build the rollout engine; an engine with a separate copy of the weights starts without weights.

    `model`: the model of the embedded engine, the trainer's own if `shares_model`. `in_group`: the process has joined
    the process group of its worker group.
    """
    rollout = config.rollout
    if rollout.backend == "embedded":
        assert model is not None, "the embedded engine requires a model"
        return EmbeddedRollout(
            model,
            max_running_sequences=rollout.max_running_sequences,
            pack_weights=rollout.pack_weights,
            shares_model=shares_model,
            tokenizer=tokenizer,
            kv_cache_bytes=rollout.kv_cache_bytes,
            memory_share=rollout.gpu_memory_utilization,
        )
    from hybridflow.rollout.vllm import VLLMRollout

    return VLLMRollout(
        config.model.path,
        dtype=config.model.dtype,
        tokenizer=tokenizer,
        max_running_sequences=rollout.max_running_sequences,
        max_model_len=rollout.max_model_len or _max_model_len(config),
        tensor_parallel=rollout.tensor,
        in_group=in_group,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_bytes=rollout.kv_cache_bytes,
        enforce_eager=rollout.enforce_eager,
        seed_requests=config.trainer.deterministic,
    )


def _max_model_len(config: Config) -> int:
    """Return the length of the longest prompt and response allowed by the data, at most the model's positions."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    settings = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
    return min(longest, settings.get("max_position_embeddings", longest))
