"""The classes of a run's environments: what a run must know of each, and whether it can serve."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.adapters import load
from hybridflow.environments.agents.agent import Agent, environment_class
from hybridflow.environments.episodes.environment import Environment
from hybridflow.environments.episodes.tools import tools_of
from hybridflow.environments.processes.arguments import LoadedReward, require_single
from hybridflow.environments.processes.host import EnvironmentHost
from hybridflow.environments.processes.limited_calls import CallLimits
from hybridflow.errors import EnvironmentConfigError
from hybridflow.runtime.user_import import load_user_function


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
    scores_groups = environment.group_rewards is not Environment.group_rewards
    if has_reward and reward_function:
        raise EnvironmentConfigError(
            f"{name} has a method `reward`, and reward.function={reward_function!r} is set: both give the rewards; "
            "remove one of them (a `reward` may call the function)."
        )
    if not (has_reward or reward_function or scores_groups or issubclass(environment, Agent)):
        raise EnvironmentConfigError(
            f"{name} has no method `reward`, so no episode of it has a score; write one, or set reward.function."
        )


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
        is_agent = issubclass(environment, Agent)  # which has no tools
        tools = {} if is_agent else tools_of(object.__new__(environment))  # their types do not depend on the object
        schemas = tuple(tool.schema() for tool in tools.values())
        scores_groups = environment.group_rewards is not Environment.group_rewards
        source += scored_by.source if scored_by else ""
        return cls(name, schemas, scores_groups, source, is_agent)


class EnvironmentClasses:
    """The classes that the settings of an `EnvironmentPool` name, by name.

    Raises EnvironmentConfigError or RewardConfigError for one that cannot be loaded or used.
    """

    def __init__(self, settings: Mapping[str, Any], by_name: Callable[..., Any] = load_user_function) -> None:
        self.limits, closures = CallLimits(**settings["limits"]), settings["closures"]
        self._slots = asyncio.Semaphore(self.limits.concurrency)
        self._scored_by = reward = LoadedReward.load(settings, by_name) if settings["reward"][0] else None
        if reward:
            require_single(reward.function, reward.name, reward.kwargs)
        self._classes: dict[str, type[Environment]] = {}
        self.kinds: dict[str, EnvironmentKind] = {}
        for name, source in settings["classes"].items():
            if source in closures:
                found, digest = closures[source].function(), ""
            else:
                found, digest = load(source, f"environment.classes.{name}", by_name)
            self._classes[name] = environment_class(found, source)
            self.kinds[name] = EnvironmentKind.of(self._classes[name], source, digest, self._scored_by)

    def host(self, name: str) -> EnvironmentHost:
        """Return what holds an object of a class, for one episode."""
        return EnvironmentHost(self._classes[name], self.limits, self._slots, self._scored_by)
