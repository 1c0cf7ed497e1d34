"""Checks of how this process was started, before anything fails in a library."""

import os
import sys

from hybridflow.errors import ConfigError


def require_usable_process() -> None:
    """Raise ConfigError if the working directory was removed, or if Python has removed docstrings."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory cannot be used ({error}); change to another one with `cd`."
        ) from error
    if sys.flags.optimize > 1:
        raise ConfigError(
            f"PYTHONOPTIMIZE={sys.flags.optimize} (python -OO) removes docstrings, which transformers reads and which "
            "describe tools to a model; unset it, or use 1."
        )
