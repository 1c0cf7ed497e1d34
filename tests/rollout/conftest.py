from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hybridflow.rollout import RolloutEngine


def build_embedded(directory: Path, dtype: str = "float64", **options) -> "RolloutEngine":
    from hybridflow.models import DTYPES, load_causal_lm
    from hybridflow.rollout import EmbeddedRollout

    return EmbeddedRollout(load_causal_lm(directory, DTYPES[dtype]), **options)


def build_vllm(directory: Path, dtype: str = "float32", **options) -> "RolloutEngine":
    from hybridflow.models import load_causal_lm
    from hybridflow.rollout import load_weights
    from hybridflow.rollout.vllm import VLLMRollout

    dtype = "float32" if dtype == "float64" else dtype  # vLLM has no float64
    engine = VLLMRollout(directory, dtype=dtype, enforce_eager=True, kv_cache_bytes=64 * 2**20, **options)
    load_weights(engine, load_causal_lm(directory).named_parameters(), version=0)
    return engine


ENGINES = {"embedded": build_embedded, "vllm": build_vllm}
"""Every implementation of RolloutEngine, by name: (directory, dtype, max_running_sequences=...) -> engine."""


@pytest.fixture(params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def build_rollout(request: pytest.FixtureRequest) -> "Callable[..., RolloutEngine]":
    """Return the builder of each implementation in turn."""
    return ENGINES[request.param]


@pytest.fixture(scope="session")
def tiny_model(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    """Return the builder of tiny models, with heads of 32: the smallest that vLLM supports on a CPU."""
    return partial(tiny_model, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
