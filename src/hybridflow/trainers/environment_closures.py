"""The classes of environments that a Python program gave, for the workers that play episodes."""

from typing import Any

from hybridflow.config import Config
from hybridflow.rewards.closure import ENVIRONMENT, closure_of


def environment_closures(config: Config) -> dict[str, Any]:
    """Return the argument `environments` of workers that generate, if a Python program gave classes."""
    found = [closure_of(source, ENVIRONMENT) for source in config.environment.classes.values()]
    given = tuple(each for each in found if each)
    return {"environments": given} if given else {}
