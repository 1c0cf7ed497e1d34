"""The one problem of a configuration."""

from collections.abc import Callable

import pytest

from hybridflow.config import load_config
from hybridflow.errors import ConfigError


@pytest.fixture
def only_problem() -> Callable[[str], str]:
    """Return a function that returns the line of the only problem of overrides; words in a row, as a value has none."""

    def problem(overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(None, overrides.split())
        first, line = str(caught.value).split("\n  ")
        assert first == "1 problem(s) in overrides:"
        return line

    return problem
