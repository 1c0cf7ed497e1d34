import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def command() -> Callable[..., list[str]]:
    """`command("balance", "--smoke")`: the command line of benchmarks/balance.py."""
    return lambda name, *arguments: [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of the delayed link; skip the test on a machine without the right to make one."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from support import delayed_link

    if lack := delayed_link.missing():
        pytest.skip(f"a delayed link needs {lack}")
    return delayed_link
