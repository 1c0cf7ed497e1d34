"""A reward function where it is called: loaded, called on samples or episodes, its results as plain values."""

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.episodes.environment import Episode
from hybridflow.environments.processes.arguments import (
    WHAT,
    arguments_of,
    check_signature,
    takes_batches,
    takes_names,
)
from hybridflow.environments.processes.closure import by_value
from hybridflow.environments.processes.user_errors import described, returns_awaitable, source_of
from hybridflow.environments.rewards.outcome import as_message
from hybridflow.errors import RewardConfigError
from hybridflow.runtime.user_import import load_user_function

Called = tuple[dict[str, Any], BaseException | None]
"""The message of a call, see `Outcome`, and the exception that it has raised."""


@dataclass(frozen=True)
class RewardKind:
    """The way to call a function, and the digest of the file that defines it (empty without a file)."""

    is_async: bool = False
    takes_batches: bool = False
    takes_names: bool = False
    source: str = ""


@dataclass(frozen=True)
class LoadedReward:
    """A reward function, its further arguments, its name in errors, and the digest of its file (empty without one)."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    name: str = ""
    source: str = ""

    @classmethod
    def load(cls, settings: Mapping[str, Any], by_name: Callable[..., Any] = load_user_function) -> "LoadedReward":
        """Return the function that the settings of a process name. Raises RewardConfigError if it cannot be used."""
        (name, kwargs), closures, source = settings["reward"], settings["closures"], ""
        if name in closures:
            function = by_value(*closures[name])
            name = getattr(function, "__name__", name)
        else:
            function = by_name(name, WHAT, RewardConfigError)
            source = source_of(function)
        check_signature(function, name, kwargs)
        return cls(function, kwargs, name, source)

    @property
    def kind(self) -> RewardKind:
        """The way to call the function."""
        function = self.function
        return RewardKind(returns_awaitable(function), takes_batches(function), takes_names(function), self.source)

    def arguments(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call on a sample or a batch, copied. Raises TypeError for a name of nothing."""
        return arguments_of(self.function, copy.deepcopy(dict(sample)), self.kwargs)

    def arguments_for(self, episode: Episode) -> dict[str, Any]:
        """Return the arguments of a call on an episode, whose environment has no `reward` of its own.

        `solution_str` is the text of the last turn; `extra_info` also has the `messages` of the episode.
        """
        row = episode.row
        sample = {
            "data_source": row.get("data_source"),
            "solution_str": episode.turns[-1].content if episode.turns else "",
            "ground_truth": row.get("ground_truth"),
            "extra_info": {**(row.get("extra_info") or {}), "messages": episode.messages},
        }
        return self.arguments(sample | ({"prompt": row["prompt"]} if takes_names(self.function) else {}))

    def call(self, sample: Mapping[str, Any]) -> Called:
        """Call the function on a sample or a batch."""
        try:
            return as_message(self.function(**self.arguments(sample))), None
        except BaseException as error:  # a user's function may raise anything
            return self.failure(error), error

    async def call_async(self, sample: Mapping[str, Any], timeout_s: float | None = None, late: str = "") -> Called:
        """Call an `async` function; `late` is the problem of a call that takes longer than its time."""
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = self.function(**self.arguments(sample))
                return as_message(await result if inspect.isawaitable(result) else result), None
        except BaseException as error:  # a user's function may raise anything
            return {"error": late, "kind": "timeout"} if limit.expired() else self.failure(error), error

    def failure(self, error: BaseException) -> dict[str, Any]:
        """Return the message of a call that has raised: the type and text of the error, its line, and its kind."""
        kind = "memory" if isinstance(error, MemoryError) else "raised"
        return {"error": described(error, self.function), "kind": kind}


def require_single(function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise RewardConfigError unless the function takes one response at a time, as episodes are scored."""
    check_signature(function, name, kwargs)
    if takes_batches(function):
        raise RewardConfigError(
            f"reward function '{name}' takes lists of responses, but episodes are scored one by one; name its "
            "parameters solution_str or completion, or give the environment a `group_rewards`."
        )
