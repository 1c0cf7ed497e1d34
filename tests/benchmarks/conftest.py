import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def command() -> Callable[..., list[str]]:
    """`command("balance", "--smoke")`: the command line of benchmarks/balance.py."""
    return lambda name, *arguments: [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
