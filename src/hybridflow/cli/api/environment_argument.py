"""Environments as a Python program gives them: classes, or the names of classes in files."""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hybridflow.config.environment_sources import scheme_of
from hybridflow.environments import Environment
from hybridflow.environments.agents.agent import environment_class
from hybridflow.environments.episodes.tools import evaluated
from hybridflow.environments.processes.closure import ENVIRONMENT, Closure
from hybridflow.environments.processes.environment_kind import require_environment
from hybridflow.errors import EnvironmentConfigError

Given = type[Environment] | Callable[..., Any] | str
Environments = Given | Mapping[str, Given] | None
"""A class, an `async` function of an agent, "path.py:Class", or several by the data source of their rows."""


def environment_sources(environments: Environments) -> tuple[dict[str, str], list[Closure]]:
    """Return environment.classes for what was given, and the classes that travel by value.

    Raises EnvironmentConfigError for what is not an environment, or cannot travel.
    """
    sources: dict[str, str] = {}
    closures: list[Closure] = []
    for name, given in _named(environments).items():
        if isinstance(given, str):
            sources[name] = given
            continue
        title = getattr(given, "__name__", repr(given)[:100])
        given = environment_class(given, title)
        require_environment(given, title)
        _read_types(given)
        closure = Closure.of(given, ENVIRONMENT)
        number = sum(closure.name == other.name.partition("#")[0] for other in closures)
        if number:  # of a function that makes classes: their source is the same
            closure = replace(closure, name=f"{closure.name}#{number}")
        sources[name] = closure.name
        closures.append(closure)
    return sources, closures


def _read_types(environment: type[Environment]) -> None:
    """Replace annotations that are texts by the types that they name: what only a text names does not travel."""
    for base in environment.__mro__:
        for method in filter(inspect.isfunction, vars(base).values() if issubclass(base, Environment) else ()):
            for parameter, annotation in method.__annotations__.items():
                with suppress(Exception):  # a tool whose type is missing is an error where tools are made
                    if isinstance(annotation, str):
                        method.__annotations__[parameter] = evaluated(method, annotation)


def _named(environments: Any) -> dict[str, Any]:
    if environments is None:
        return {}
    if isinstance(environments, Mapping):
        if not environments:
            raise EnvironmentConfigError("environments={} names no class; give one, or leave environments out.")
        return {str(name): given for name, given in environments.items()}
    if not isinstance(environments, str | type) and not callable(environments):
        raise EnvironmentConfigError(
            f"environments={environments!r:.100} is a {type(environments).__name__}; expected a class, its name as in "
            "'path.py:Class', or a dict of several by data source."
        )
    if isinstance(environments, str):
        name = scheme_of(environments) or environments.rpartition(":")[2]
    else:
        name = getattr(environments, "__name__", "agent")
    return {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(): environments}
