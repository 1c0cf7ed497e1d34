"""The rollout engine that a configuration describes."""

import pytest

from hybridflow.config import load_config
from hybridflow.data import load_tokenizer
from hybridflow.workers.rollout_engine import build_rollout_engine


@pytest.mark.vllm
@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_vllm_requests_have_seeds_only_in_deterministic_mode(tiny_model, deterministic):
    path = tiny_model(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    config = load_config(
        None,
        [
            *(f"model.path={path}", "model.dtype=float32", "rollout.backend=vllm"),
            f"trainer.deterministic={deterministic}",
            *("rollout.enforce_eager=true", f"rollout.kv_cache_bytes={2**26}", "data.max_prompt_length=30"),
            "data.max_response_length=30",
        ],
    )
    engine = build_rollout_engine(config, load_tokenizer(path))
    assert engine._engine._seed_requests is (deterministic == "true")
