"""`reward.function` on whole episodes: it scores those whose environment has no `reward` of its own."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.episodes.environment import Episode
from hybridflow.environments.processes.arguments import (
    arguments_of,
    check_signature,
    load_reward_function,
    takes_batches,
    takes_names,
)
from hybridflow.environments.processes.reward_process import by_value, source_of
from hybridflow.errors import RewardConfigError


@dataclass(frozen=True)
class EpisodeReward:
    """A reward function, its name, its further `kwargs` and the digest of its file (empty without one)."""

    function: Callable[..., Any]
    name: str
    kwargs: Mapping[str, Any]
    source: str = ""

    @classmethod
    def load(cls, settings: Mapping[str, Any]) -> "EpisodeReward | None":
        """Return the function that the settings of a process name; None if they name none.

        Raises RewardConfigError if it cannot be loaded, or scores lists of responses.
        """
        (name, kwargs), closures = settings["reward"], settings["closures"]
        if not name:
            return None
        if name in closures:
            function, source = by_value(*closures[name]), ""
            name = getattr(function, "__name__", name)
        else:
            function = load_reward_function(name, kwargs)
            source = source_of(function)
        require_single(function, name, kwargs)
        return cls(function, name, kwargs, source)

    def arguments(self, episode: Episode) -> dict[str, Any]:
        """Return the keyword arguments of the call on an episode. Raises TypeError for a parameter that names nothing.

        `solution_str` is the text of the last turn; `extra_info` also has the `messages` of the episode.
        """
        row = episode.row
        sample = {
            "data_source": row.get("data_source"),
            "solution_str": episode.turns[-1].content if episode.turns else "",
            "ground_truth": row.get("ground_truth"),
            "extra_info": {**(row.get("extra_info") or {}), "messages": episode.messages},
        }
        if takes_names(self.function):
            sample["prompt"] = row["prompt"]
        return arguments_of(self.function, copy.deepcopy(sample), self.kwargs)


def require_single(function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise RewardConfigError unless the function takes one response at a time."""
    check_signature(function, name, kwargs)
    if takes_batches(function):
        raise RewardConfigError(
            f"reward function '{name}' takes lists of responses, but episodes are scored one by one; name its "
            "parameters solution_str or completion, or give the environment a `group_rewards`."
        )
