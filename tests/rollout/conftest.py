import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hybridflow.rollout import RolloutEngine


def build_embedded(directory: Path, dtype: str = "float64", **options) -> "RolloutEngine":
    from hybridflow.models.loading import DTYPES, load_causal_lm
    from hybridflow.rollout import EmbeddedRollout

    return EmbeddedRollout(load_causal_lm(directory, DTYPES[dtype]), **options)


def build_vllm(directory: Path, dtype: str = "float32", **options) -> "RolloutEngine":
    from fixtures.vllm_engines import lend_engine

    return lend_engine(directory, dtype="float32" if dtype == "float64" else dtype, **options)  # vLLM has no float64


ENGINES = {
    "embedded": build_embedded,
    "paged": partial(build_embedded, paged=True),
    "vllm": build_vllm,
    "vllm_async": partial(build_vllm, asynchronous=True),
}
"""Every implementation of RolloutEngine, by name: (directory, dtype, max_running_sequences=...) -> engine."""


@pytest.fixture(
    params=["embedded", "paged", *(pytest.param(name, marks=pytest.mark.vllm) for name in ("vllm", "vllm_async"))]
)
def engine_name(request: pytest.FixtureRequest) -> str:
    """Return the name of each implementation in turn."""
    return request.param


@pytest.fixture
def build_rollout(engine_name: str) -> "Callable[..., RolloutEngine]":
    """Return the builder of each implementation in turn."""
    return ENGINES[engine_name]


@pytest.fixture(autouse=True)
def engines_taken_back() -> Iterator[None]:
    """Make the vLLM engines of a test available to the next one."""
    yield
    if "fixtures.vllm_engines" in sys.modules:
        sys.modules["fixtures.vllm_engines"].take_back_engines()


@pytest.fixture(scope="session")
def tiny_model(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    """Return the builder of tiny models, with heads of 32: the smallest that vLLM supports on a CPU."""
    return partial(tiny_model, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
