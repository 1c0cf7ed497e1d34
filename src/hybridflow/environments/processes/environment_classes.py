"""The classes of a run's environments, loaded where their objects live: in the rank, or in a process."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.environments.adapters import load
from hybridflow.environments.agents.agent import environment_class
from hybridflow.environments.episodes.environment import Environment
from hybridflow.environments.processes.arguments import LoadedReward, require_single
from hybridflow.environments.processes.closure import by_value
from hybridflow.environments.processes.environment_kind import EnvironmentKind
from hybridflow.environments.processes.host import EnvironmentHost
from hybridflow.environments.processes.limited_calls import CallLimits
from hybridflow.runtime.user_import import load_user_function


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
                found, digest = by_value(*closures[source]), ""
            else:
                found, digest = load(source, f"environment.classes.{name}", by_name)
            self._classes[name] = environment_class(found, source)
            self.kinds[name] = EnvironmentKind.of(self._classes[name], source, digest, self._scored_by)

    def host(self, name: str) -> EnvironmentHost:
        """Return what holds an object of a class, for one episode."""
        return EnvironmentHost(self._classes[name], self.limits, self._slots, self._scored_by)
