"""A directory that passes for a model, and settings of the process that a trainer changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Return a directory with the configuration of a model, which trainers accept before they load it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def restores_the_process() -> Iterator[None]:
    """Restore the threads and the determinism that a run in this process sets."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
