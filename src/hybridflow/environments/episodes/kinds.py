"""What a run must know of a user's class of environments before an episode of it begins."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hybridflow.environments.episodes.environment import METHODS, Environment
from hybridflow.environments.episodes.tools import tools_of
from hybridflow.environments.processes.host import require_rewards, scores_groups


@dataclass(frozen=True)
class EnvironmentKind:
    """A class of environments: the schemas of its tools, whether it compares the episodes of a prompt, and its source.

    `source` is a digest of the file that defines the class; empty if there is none.
    """

    name: str
    schemas: tuple[Mapping[str, Any], ...]
    scores_groups: bool
    source: str

    @classmethod
    def of(cls, environment: type[Environment], name: str, source: str = "") -> "EnvironmentKind":
        """Return the kind of a class. Raises EnvironmentConfigError if it has no reward, or a tool without a schema."""
        require_rewards(environment, name)
        tools = tools_of(object.__new__(environment), METHODS)  # types and docstrings do not depend on the object
        return cls(name, tuple(tool.schema() for tool in tools.values()), scores_groups(environment), source)

    def to_message(self) -> dict[str, Any]:
        """Return the kind as values of JSON."""
        return asdict(self)

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "EnvironmentKind":
        """Return the kind that `to_message` has written."""
        return cls(
            str(message["name"]), tuple(message["schemas"]), bool(message["scores_groups"]), str(message["source"])
        )
