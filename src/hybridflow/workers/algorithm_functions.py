"""The advantage estimator and the policy loss of a configuration, from the tables or from the user's code.

The signature of a function declares its inputs: columns are keyword arguments named as in the glossary of batch fields;
all other arguments are parameters, named like their configuration key or given in the `_kwargs` key of the function.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor

from hybridflow.algorithms import ADVANTAGES, POLICY_LOSSES, SELECTIONS
from hybridflow.config import Config, Section
from hybridflow.errors import ConfigError
from hybridflow.protocol import FIELDS
from hybridflow.runtime.user_code import did_you_mean
from hybridflow.runtime.user_import import load_user_function

SELECTION_INPUTS = ("covariances", "seed")
"""Arguments that the worker computes for a token selection."""

LOSS_INPUTS = ("log_probs",)
"""Arguments that the worker computes for a policy loss, in addition to batch columns: the current log-probs."""

ESTIMATOR_KEYS = ("gamma", "lam", "norm_by_std", "whiten_advantages")
"""Keys of [algorithm] that only an estimator with a parameter of this name reads."""

LOSS_KEYS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_dual")
"""Keys of [actor] that only a policy loss with a parameter of this name reads."""


@dataclass(frozen=True)
class AlgorithmFunction:
    """A function with the batch columns that it reads and the values of its parameters."""

    function: Callable[..., Any]
    columns: tuple[str, ...]
    parameters: Mapping[str, Any]

    def __call__(self, **columns: Any) -> Any:
        """Call the function with these columns and its parameters."""
        return self.function(**columns, **self.parameters)


def advantage_estimator(config: Config) -> AlgorithmFunction:
    """Return the function of `algorithm.advantage`. Raises ConfigError if it is not found or its kwargs do not fit."""
    algorithm = config.algorithm
    return _resolve(
        ("algorithm", "advantage"),
        algorithm,
        ADVANTAGES,
        given={"component_weights": tuple(config.reward.weights.values())},
        made=(),
    )


def policy_loss(config: Config) -> AlgorithmFunction:
    """Return the function of `actor.policy_loss`. Raises ConfigError if it is not found or its kwargs do not fit."""
    return _resolve(
        ("actor", "policy_loss"),
        config.actor,
        POLICY_LOSSES,
        given={},
        made=LOSS_INPUTS,
        elsewhere=_parameters_of_selection(config),
    )


def keys_without_effect(config: Config) -> list[str]:
    """Return one line for each changed parameter key that the estimator or the policy loss does not take."""
    found = []
    for section, leaf, keys, resolved in (
        ("algorithm", "advantage", ESTIMATOR_KEYS, advantage_estimator(config)),
        ("actor", "policy_loss", LOSS_KEYS, policy_loss(config)),
    ):
        values = getattr(config, section)
        for key in keys:
            value = getattr(values, key)
            if key not in resolved.parameters and value != type(values).model_fields[key].default:
                found.append(
                    f"{section}.{key}={value!r} has no effect: {section}.{leaf}={getattr(values, leaf)!r} has no "
                    "such parameter."
                )
    return found


def reads_column(config: Config, column: str) -> bool:
    """Return whether the advantage estimator or the policy loss reads a column."""
    return column in advantage_estimator(config).columns or column in policy_loss(config).columns


def token_selection(config: Config) -> Callable[..., Tensor] | None:
    """Return the token selection of the policy loss, a function of `covariances` and `seed`; None if it has none."""
    select = SELECTIONS.get(config.actor.policy_loss)
    if select is None:
        return None
    names, kwargs = _parameters_of_selection(config), config.actor.policy_loss_kwargs
    return partial(select, **{name: value for name, value in kwargs.items() if name in names})


def _parameters_of_selection(config: Config) -> tuple[str, ...]:
    select = SELECTIONS.get(config.actor.policy_loss)
    names = inspect.signature(select).parameters if select else ()
    return tuple(name for name in names if name not in SELECTION_INPUTS)


def _resolve(
    key: tuple[str, str],
    section: Section,
    table: Mapping[str, Callable[..., Any]],
    given: Mapping[str, Any],
    made: tuple[str, ...],
    elsewhere: tuple[str, ...] = (),
) -> AlgorithmFunction:
    """Return the function named by a configuration key, with its columns and parameters.

    `given`: values of arguments that are not configuration keys. `made`: arguments that the worker computes.
    `elsewhere`: kwargs of the token selection, which the function does not receive.
    """
    section_name, leaf = key
    name, kwargs = getattr(section, leaf), getattr(section, f"{leaf}_kwargs")
    function = table.get(name) or _user_function(name, f"{section_name}.{leaf}")
    signature = inspect.signature(function).parameters
    columns = tuple(argument for argument in signature if argument in FIELDS)
    keys = {argument for argument in signature if argument in type(section).model_fields}
    free = [argument for argument in signature if argument not in {*columns, *made, *keys, *given}]
    what = f"{section_name}.{leaf}={name!r}"
    for argument in kwargs:
        if argument in keys:
            raise ConfigError(
                f"{section_name}.{leaf}_kwargs.{argument} is a separate key; set {section_name}.{argument}."
            )
        if argument not in (*free, *elsewhere):
            valid = ", ".join([*free, *elsewhere]) or "none"
            raise ConfigError(
                f"{section_name}.{leaf}_kwargs.{argument}: {what} has no such parameter"
                f"{did_you_mean([argument], [*free, *elsewhere])}; it has: {valid}."
            )
    required = [a for a in free if signature[a].default is inspect.Parameter.empty and a not in kwargs]
    if required:
        valid = [*FIELDS, *made, *given, *type(section).model_fields]
        raise ConfigError(
            f"{what} takes {', '.join(required)}{did_you_mean(required, valid)}, which is neither a column of the "
            f"batch nor a key of [{section_name}]; give it in {section_name}.{leaf}_kwargs, or name a column of "
            "docs/data_proto.md."
        )
    parameters = {argument: getattr(section, argument) for argument in sorted(keys)}
    parameters |= {argument: value for argument, value in given.items() if argument in signature}
    parameters |= {argument: value for argument, value in kwargs.items() if argument not in elsewhere}
    return AlgorithmFunction(function, columns, parameters)


@cache
def _user_function(name: str, key: str) -> Callable[..., Any]:
    return load_user_function(name, key, ConfigError)
