from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hybridflow.rollout import RolloutEngine

DTYPES = ("float32", "bfloat16", "float64")


def build_embedded(directory: Path, dtype: str = "float64", **options) -> "RolloutEngine":
    from hybridflow.models import DTYPES, load_causal_lm
    from hybridflow.rollout import EmbeddedRollout

    return EmbeddedRollout(load_causal_lm(directory, DTYPES[dtype]), **options)


ENGINES = {"embedded": build_embedded}
"""Every implementation of RolloutEngine, by name: (directory, dtype, max_running_sequences=...) -> engine."""


@pytest.fixture(params=list(ENGINES))
def build_rollout(request: pytest.FixtureRequest) -> "Callable[..., RolloutEngine]":
    """Each implementation in turn: the contract is the same for all."""
    return ENGINES[request.param]
