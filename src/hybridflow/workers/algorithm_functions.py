"""The functions that a configuration names: an advantage estimator and a policy loss, of the tables or of the user's.

A function's signature is the declaration of what it reads: columns are keyword arguments named as in the glossary of
batch fields; everything else is a parameter, named as its configuration key or given in the `_kwargs` beside its name.
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
from hybridflow.runtime import did_you_mean, load_user_function

MADE_FOR_SELECTION = ("covariances", "seed")
MADE_BY_LOSS = ("log_probs",)
"""What a policy loss is given beside the columns of its batch: the log-probs that are learned."""


@dataclass(frozen=True)
class AlgorithmFunction:
    """A function with the batch columns that it takes and the values of its parameters."""

    function: Callable[..., Any]
    columns: tuple[str, ...]
    parameters: Mapping[str, Any]

    def __call__(self, **columns: Any) -> Any:
        return self.function(**columns, **self.parameters)


def advantage_estimator(config: Config) -> AlgorithmFunction:
    """What `algorithm.advantage` names. Raises ConfigError if it is no function, or its kwargs do not fit."""
    algorithm = config.algorithm
    return _resolved(
        ("algorithm", "advantage"),
        algorithm,
        ADVANTAGES,
        given={"component_weights": tuple(config.reward.weights.values())},
        made=(),
    )


def policy_loss(config: Config) -> AlgorithmFunction:
    """What `actor.policy_loss` names. Raises ConfigError if it is no function, or its kwargs do not fit."""
    return _resolved(
        ("actor", "policy_loss"),
        config.actor,
        POLICY_LOSSES,
        given={},
        made=MADE_BY_LOSS,
        elsewhere=_parameters_of_selection(config),
    )


def reads_column(config: Config, column: str) -> bool:
    """Whether the advantage estimator or the policy loss reads a column."""
    return column in advantage_estimator(config).columns or column in policy_loss(config).columns


def token_selection(config: Config) -> Callable[..., Tensor] | None:
    """What selects tokens for the policy loss, given `covariances` and `seed`; None where it selects none."""
    select = SELECTIONS.get(config.actor.policy_loss)
    if select is None:
        return None
    names, kwargs = _parameters_of_selection(config), config.actor.policy_loss_kwargs
    return partial(select, **{name: value for name, value in kwargs.items() if name in names})


def _parameters_of_selection(config: Config) -> tuple[str, ...]:
    select = SELECTIONS.get(config.actor.policy_loss)
    names = inspect.signature(select).parameters if select else ()
    return tuple(name for name in names if name not in MADE_FOR_SELECTION)


def _resolved(
    key: tuple[str, str],
    section: Section,
    table: Mapping[str, Callable[..., Any]],
    given: Mapping[str, Any],
    made: tuple[str, ...],
    elsewhere: tuple[str, ...] = (),
) -> AlgorithmFunction:
    section_name, leaf = key
    name, kwargs = getattr(section, leaf), getattr(section, f"{leaf}_kwargs")
    function = table.get(name) or _of_user(name, f"{section_name}.{leaf}")
    signature = inspect.signature(function).parameters
    columns = tuple(argument for argument in signature if argument in FIELDS)
    keys = {argument for argument in signature if argument in type(section).model_fields}
    free = [argument for argument in signature if argument not in {*columns, *made, *keys, *given}]
    what = f"{section_name}.{leaf}={name!r}"
    for argument in kwargs:
        if argument in keys:
            raise ConfigError(
                f"{section_name}.{leaf}_kwargs.{argument} is a key of its own; set {section_name}.{argument}."
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
def _of_user(name: str, key: str) -> Callable[..., Any]:
    return load_user_function(name, key, ConfigError)
