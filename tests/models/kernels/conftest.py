from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def with_threads() -> Callable[[Callable[[], Any]], list[Any]]:
    """Return a function that gives the results of a computation with one thread and with two."""

    def run(compute: Callable[[], Any]) -> list[Any]:
        threads, results = torch.get_num_threads(), []
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                results.append(compute())
        finally:
            torch.set_num_threads(threads)
        return results

    return run
