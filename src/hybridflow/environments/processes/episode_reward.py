"""`reward.function` on whole episodes: it scores those whose environment has no `reward` of its own."""

from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.environments.episodes.environment import Episode
from hybridflow.environments.processes.arguments import check_signature, takes_batches, takes_names
from hybridflow.environments.processes.loaded_reward import LoadedReward
from hybridflow.errors import RewardConfigError


def load_episode_reward(settings: Mapping[str, Any], by_name: Callable[..., Any]) -> LoadedReward | None:
    """Return the function that the settings of a process name; None if they name none.

    Raises RewardConfigError if it cannot be loaded, or scores lists of responses.
    """
    if not settings["reward"][0]:
        return None
    reward = LoadedReward.load(settings, by_name)
    require_single(reward.function, reward.name, reward.kwargs)
    return reward


def arguments_for(reward: LoadedReward, episode: Episode) -> dict[str, Any]:
    """Return the arguments of a call on an episode. Raises TypeError for a parameter that names nothing.

    `solution_str` is the text of the last turn; `extra_info` also has the `messages` of the episode.
    """
    row = episode.row
    sample = {
        "data_source": row.get("data_source"),
        "solution_str": episode.turns[-1].content if episode.turns else "",
        "ground_truth": row.get("ground_truth"),
        "extra_info": {**(row.get("extra_info") or {}), "messages": episode.messages},
    }
    return reward.arguments(sample | ({"prompt": row["prompt"]} if takes_names(reward.function) else {}))


def require_single(function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise RewardConfigError unless the function takes one response at a time."""
    check_signature(function, name, kwargs)
    if takes_batches(function):
        raise RewardConfigError(
            f"reward function '{name}' takes lists of responses, but episodes are scored one by one; name its "
            "parameters solution_str or completion, or give the environment a `group_rewards`."
        )
