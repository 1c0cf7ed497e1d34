"""Keys of the configuration as Python arguments, and recipes by name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config import leaf_keys
from hybridflow.config.load import algorithm_names, packaged_recipe
from hybridflow.config.render import toml_value
from hybridflow.errors import ConfigError

Recipe = str | Path | Sequence[str | Path] | None


def recipe_files(recipe: Recipe) -> list[Path]:
    """Return the files of recipes: paths, or names of algorithms such as "dapo"; ConfigError for another name."""
    given: list[Any] = list(recipe) if isinstance(recipe, list | tuple) else [] if recipe is None else [recipe]
    return [_recipe_file(each) for each in given]


def _recipe_file(recipe: Any) -> Path:
    if not isinstance(recipe, str | Path):
        raise ConfigError(f"recipe={recipe!r:.100} is invalid; expected a name, a file, or a list of them.")
    if not isinstance(recipe, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", recipe):
        return Path(recipe)
    file = packaged_recipe(recipe)
    if file is None:
        raise ConfigError(f"recipe={recipe!r} is unknown; expected a file, or one of {', '.join(algorithm_names())}.")
    return file


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return `key=value` for each setting: `{"trainer.total_steps": 100}`, or `{"trainer": {"total_steps": 100}}`.

    Raises ConfigError for a value that TOML lacks.
    """
    return [f"{key}={_toml(key, value)}" for key, value in _leaves(settings)]


def keys_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys that settings set."""
    return [key for key, _ in _leaves(settings)]


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in leaf_keys():
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _toml(key: str, value: Any) -> str:
    plain = _plain(value)
    try:
        return toml_value(plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}={value!r:.100} is invalid: {error}; expected a number, a text, a list, or True or False."
        ) from error


def _plain(value: Any) -> Any:
    """Return paths as texts, lists as tuples, and numbers of numpy and torch as those of Python."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
