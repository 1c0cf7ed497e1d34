"""The logger `hybridflow`, which writes to stderr with the level of HYBRIDFLOW_LOGGING_LEVEL.

Loggers of other packages keep their own levels.
"""

import logging
import os
import sys
from typing import TextIO

from hybridflow.errors import ConfigError

LEVEL_VARIABLE = "HYBRIDFLOW_LOGGING_LEVEL"
LEVELS = ("debug", "info", "warning", "error", "critical")
DEFAULT_LEVEL = "info"


def get_logger(name: str) -> logging.Logger:
    """Return the logger `name` (a module's `__name__`) below `hybridflow`; the first call configures the output.

    If the root logger has handlers, they are used instead of our stderr handler. Raises ConfigError if
    HYBRIDFLOW_LOGGING_LEVEL is not one of `LEVELS`.
    """
    root = logging.getLogger("hybridflow")
    if not any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        root.setLevel(level_from_environment())
        root.addHandler(_StderrHandler())
    return root if name == "hybridflow" else root.getChild(name.removeprefix("hybridflow."))


def level_from_environment() -> int:
    """Return HYBRIDFLOW_LOGGING_LEVEL as a level of `logging`; info if it is unset or empty."""
    text = os.environ.get(LEVEL_VARIABLE, "") or DEFAULT_LEVEL
    if text.lower() not in LEVELS:
        raise ConfigError(
            f"{LEVEL_VARIABLE}={text!r} is not a log level; use {', '.join(LEVELS[:-1])} or {LEVELS[-1]}."
        )
    return logging.getLevelNamesMapping()[text.upper()]


class _StderrHandler(logging.StreamHandler[TextIO]):
    """A handler that writes to the current `sys.stderr`, since the live console and tests replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)
