"""A reward function where it is called: loaded, called on samples or episodes, its results as plain values.

Its keyword arguments are four fixed ones, or those that its parameters name.
"""

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.episodes.environment import Episode
from hybridflow.environments.processes.user_errors import described, returns_awaitable, source_of
from hybridflow.environments.rewards.outcome import as_message
from hybridflow.environments.rewards.table import RewardFunction
from hybridflow.errors import RewardConfigError
from hybridflow.runtime.user_code import did_you_mean, require_arguments
from hybridflow.runtime.user_import import load_user_function

WHAT = "reward function"

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none if it has no signature, as some compiled functions."""
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):
        return {}


def takes_names(function: Any) -> bool:
    """Return whether the parameters name what the function gets: one is `completion` or `completions`."""
    names = parameters_of(function)
    return ("completion" in names or "completions" in names) and not {"solution_str", "solution_strs"} & {*names}


def takes_batches(function: Any) -> bool:
    """Return whether the function takes lists with an entry for each sample: `solution_strs` or `completions`."""
    names = parameters_of(function)
    pairs = (("solution_strs", "solution_str"), ("completions", "completion"))
    return any(plural in names and singular not in names for plural, singular in pairs)


def as_batch(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return samples as lists under the plurals of their names, such as `solution_strs`."""
    return {f"{name}s": [sample[name] for sample in samples] for name in samples[0]}


def num_samples_of(arguments: Mapping[str, Any]) -> int:
    """Return the number of samples in the arguments: 1, or the length of a batch's lists."""
    return len(arguments["solution_strs"]) if "solution_strs" in arguments else 1


def arguments_of(function: Any, sample: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call on a sample with ARGUMENTS, and `prompt` for names, or on an `as_batch` of them.

    A function that takes names gets what its parameters name, and with `**kwargs` everything. Raises TypeError for a
    parameter that names nothing.
    """
    if not takes_names(function):
        return {**sample, **kwargs}
    values = _values_of_batch(sample) if "solution_strs" in sample else _values_of(sample)
    taken = next((name for name in kwargs if name in values and name.removesuffix("s") in _FIXED), None)
    if taken:
        raise TypeError(f"reward.kwargs.{taken} is a part of the sample; give it another name")
    parameters = parameters_of(function)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    chosen = {name: value for name, value in values.items() if takes_all or name in parameters} | dict(kwargs)
    for name, each in parameters.items():
        if each.kind in _BY_NAME and each.default is each.empty and name not in chosen:
            hint = did_you_mean([name], values)
            raise TypeError(f"its parameter '{name}' names nothing of the sample, which has {', '.join(values)}{hint}")
    return chosen


_FIXED = ("prompt", "completion", "data_source", "ground_truth", "extra_info")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _values_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a function can name of a sample; `answer` is the ground truth unless extra_info has another."""
    fixed = {name: sample.get("solution_str" if name == "completion" else name) for name in _FIXED}
    return {"answer": fixed["ground_truth"], **(fixed["extra_info"] or {}), **fixed}


def _values_of_batch(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return all that a function can name of a batch: lists by the plurals, those of extra_info also by their names."""
    rows = [
        _values_of({name.removesuffix("s"): value for name, value in zip(batch, row, strict=True)})
        for row in zip(*batch.values(), strict=True)
    ]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    plurals = {f"{name}s": column for name, column in columns.items()}
    return plurals | {name: column for name, column in columns.items() if name not in _FIXED}


def load_reward_function(name: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the function that 'path/to/file.py:function' or 'package.module:function' names.

    Raises `RewardError` if the file, module or function does not exist, if the code fails on import, or if the function
    cannot be called with the keyword arguments data_source, solution_str, ground_truth, extra_info (or all of their
    plurals) and `kwargs`, nor has a parameter `completion` or `completions`.
    """
    function: RewardFunction = load_user_function(name, WHAT, RewardConfigError)
    check_signature(function, name, kwargs or {})
    return function


def check_signature(function: RewardFunction, name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise RewardConfigError if the function takes neither the four arguments, their plurals nor names."""
    parameters = parameters_of(function)
    names = [each for each, by in parameters.items() if by.kind in _BY_NAME]
    own = [each for each in names if parameters[each].default is inspect.Parameter.empty and each not in kwargs]
    if own and not {*ARGUMENTS, *BATCH_ARGUMENTS, "completion", "completions"} & {*parameters}:
        hint = did_you_mean([each for each in own if each not in _NAMES], _NAMES)
        raise RewardConfigError(
            f"{WHAT} '{name}' has the parameters {', '.join(own)}, of which none is the response{hint}; name it "
            f"completion, or completions for lists of all rows. Others may be {', '.join(_NAMES[1:])}, or columns of "
            "the rows."
        )
    if not takes_names(function):  # otherwise all that it has names something
        names = [*(BATCH_ARGUMENTS if takes_batches(function) else ARGUMENTS)]
    require_arguments(function, name, WHAT, list(dict.fromkeys([*names, *kwargs])), RewardConfigError)


_NAMES = ("completion", "prompt", "answer", "ground_truth", "data_source", "extra_info")


def check_names(
    function: RewardFunction, name: str, kwargs: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> None:
    """Raise `RewardError` if a parameter names nothing of some sample, or an answer that no sample has."""
    if not samples or not takes_names(function):
        return
    kinds = [*{tuple(sample["extra_info"] or ()): sample for sample in samples}.values()]
    try:
        for call in [as_batch(kinds)] if takes_batches(function) else kinds:
            arguments_of(function, call, kwargs)
    except TypeError as error:
        raise RewardConfigError(f"{WHAT} '{name}': {error}.") from None
    columns = [*dict.fromkeys(column for sample in kinds for column in sample["extra_info"] or ())]
    if "answer" in columns or any(sample["ground_truth"] != "" for sample in samples):
        return
    others = ", ".join(column for column in columns if column not in ("split", "index"))
    for needed, each in parameters_of(function).items():
        if needed.removesuffix("s") in ("answer", "ground_truth") and each.default is each.empty:
            raise RewardConfigError(
                f"{WHAT} '{name}' has the parameter '{needed}', but in all rows: 'answer' is missing"
                f"{others and '; the row has '}{others}. If the function does without, give its parameter a default."
            )


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
            function = closures[name].function()
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
