"""Checks of contradictions between keys, in one module for each module of sections.

Each has `CHECKS`, which yield a line for each value that another one makes wrong, and `REFUSALS`, features that
do not combine. They read only the configuration; what depends on a file or a tokenizer is checked where it is opened.
"""

from hybridflow.config.checks import data, generation, learning, models, run
from hybridflow.config.checks.refusal import Refusal, refused
from hybridflow.config.sections.config import Config
from hybridflow.errors import ConfigError

REFUSALS: tuple[Refusal, ...] = (
    *learning.REFUSALS,
    *generation.REFUSALS,
    *data.REFUSALS,
    *models.REFUSALS,
    *run.REFUSALS,
)
"""Features that do not combine; a test holds their number, which may only fall."""


def contradictions(config: Config) -> list[str]:
    """Return one line for each contradiction between keys, with both values and the fix."""
    checks = (*run.CHECKS, *models.CHECKS, *data.CHECKS, *generation.CHECKS, *learning.CHECKS)
    return [*(problem for check in checks for problem in check(config)), *refused(REFUSALS, config)]


def check(config: Config) -> None:
    """Raise ConfigError with all contradictions in a `Config` that was built in Python."""
    if problems := contradictions(config):
        raise ConfigError("\n  ".join([f"{len(problems)} problem(s) in the configuration:", *problems]))
