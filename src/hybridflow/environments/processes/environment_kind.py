"""What a run must know of a class of environments, and whether the class can serve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.agents.agent import Agent
from hybridflow.environments.episodes.environment import Environment
from hybridflow.environments.episodes.tools import Tool, tools_of
from hybridflow.environments.processes.arguments import LoadedReward
from hybridflow.errors import EnvironmentConfigError


def require_environment(environment: type[Environment], name: str) -> None:
    """Raise EnvironmentConfigError unless this is a class of environments."""
    if not isinstance(environment, type) or not issubclass(environment, Environment):
        raise EnvironmentConfigError(
            f"'{name}' does not name a subclass of hybridflow.environments.Environment; derive the class from it."
        )


def require_rewards(environment: type[Environment], reward_function: str) -> None:
    """Raise EnvironmentConfigError unless either the class or reward.function says what an episode is worth.

    An agent may also say it itself.
    """
    name, has_reward = environment.__name__, environment.reward is not Environment.reward
    if has_reward and reward_function:
        raise EnvironmentConfigError(
            f"{name} has a method `reward`, and reward.function={reward_function!r} is set: both give the rewards; "
            "remove one of them (a `reward` may call the function)."
        )
    if not (has_reward or reward_function or scores_groups(environment) or issubclass(environment, Agent)):
        raise EnvironmentConfigError(
            f"{name} has no method `reward`, so no episode of it has a score; write one, or set reward.function."
        )


def scores_groups(environment: type[Environment]) -> bool:
    """Return whether the class compares the episodes of a prompt."""
    return environment.group_rewards is not Environment.group_rewards


@dataclass(frozen=True)
class EnvironmentKind:
    """A class of environments: the schemas of its tools, whether it compares the episodes of a prompt, and its source.

    `source` is a digest of the files that define the class and its reward function; empty if there is none.
    """

    name: str
    schemas: tuple[Mapping[str, Any], ...]
    scores_groups: bool
    source: str
    is_agent: bool = False

    @classmethod
    def of(
        cls, environment: type[Environment], name: str, source: str = "", scored_by: LoadedReward | None = None
    ) -> "EnvironmentKind":
        """Return the kind of a class, whose episodes `scored_by` scores if it has no `reward`.

        Raises EnvironmentConfigError if there is no reward, or there are two, or a tool has no schema.
        """
        require_environment(environment, name)
        require_rewards(environment, scored_by.name if scored_by else "")
        tools = tools_of_environment(object.__new__(environment))  # types and docstrings do not depend on the object
        schemas = tuple(tool.schema() for tool in tools.values())
        source += scored_by.source if scored_by else ""
        return cls(name, schemas, scores_groups(environment), source, issubclass(environment, Agent))


def tools_of_environment(environment: Environment) -> dict[str, Tool]:
    """Return the tools of an environment by name; an agent has none."""
    return {} if isinstance(environment, Agent) else tools_of(environment)
