"""Refusals: pairs of features that both make sense and do not combine, each declared once.

A refusal is the check, the line of the error, and by `config.refusals_markdown` a row of docs/configuration.md.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from hybridflow.config.sections.config import Config
from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """A pair of features that cannot be combined.

    `feature` and `other` begin with a key, after which the values may follow that are meant; `other` may be a command,
    which then calls `require`. `why` and `fix` continue the line of the error.
    """

    feature: str
    other: str
    why: str
    fix: str
    applies: Callable[[Config], bool]

    def problem(self, config: Config) -> str:
        """Return the line of the error, with both values."""
        feature, other = _with_value(self.feature, config), _with_value(self.other, config)
        return f"{feature} is not supported with {other}: {self.why}; {self.fix}"

    def require(self, config: Config) -> None:
        """Raise ConfigError if the configuration has both."""
        if self.applies(config):
            raise ConfigError(f"{self.problem(config)}.")


def refused(refusals: Sequence[Refusal], config: Config) -> Iterator[str]:
    """Yield the line of each refusal that applies to a run."""
    yield from (each.problem(config) for each in refusals if not is_command(each.other) and each.applies(config))


def any_of(names: Iterable[str]) -> str:
    """Return names as values of a key, joined by "or"."""
    return " or ".join(map(repr, names))


def is_command(feature: str) -> bool:
    """Return whether a feature is a command, not a key."""
    return feature.startswith("hybridflow ")


def _with_value(feature: str, config: Config) -> str:
    """Return the key with its value in the configuration; a command as it is."""
    if is_command(feature):
        return f"`{feature}`"
    key = feature.split()[0]
    value = reduce(getattr, key.split("."), config)
    return f"{key}={str(value).lower() if isinstance(value, bool) else repr(_as_lists(value))}"


def _as_lists(value: object) -> object:
    """Return a value with lists in place of tuples, as a recipe writes them."""
    if isinstance(value, dict):
        return {name: _as_lists(each) for name, each in value.items()}
    return [_as_lists(each) for each in value] if isinstance(value, tuple) else value
