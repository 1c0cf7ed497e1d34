"""Loads TOML recipes and dotted overrides into one frozen, checked `Config`, or reports all their problems."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hybridflow.config.aliases import keys_of_alias
from hybridflow.config.checks import contradictions
from hybridflow.config.keys import DIRECTORIES, FILES, holds_text, leaf_keys, nearest_key, sections
from hybridflow.config.sections.config import Config
from hybridflow.errors import ConfigError


def load_config(recipe: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = ()) -> Config:
    """Load recipes (None: only defaults), apply `section.key=value` overrides in order, and check the result.

    A recipe is a file, the name of an algorithm such as "dapo", or the path of a recipe of the package. Later recipes
    override earlier ones. The value of an override is parsed as TOML (`3`, `true`, `[1, 2]`, `"text"`);
    if it is not valid TOML, it is taken as text.
    Raises ConfigError: at once for a file that cannot be read, otherwise with all problems, each with its key, its
    value and, for an unknown key, the key to write instead.
    """
    recipes = [recipe] if isinstance(recipe, str | Path) else list(recipe or ())
    values: dict[str, Any] = Config().model_dump()
    for path in recipes:
        values = _merged(values, _read(Path(path)))
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            problems.append(f"{_shown(override)} is not an override; write section.key=value")
        elif len(key) > LONGEST_KEY:
            problems.append(f"{_shown(key)}: no such key; it has {len(key)} characters")
        else:
            value = _override_value(key.strip(), text.strip())
            if key.strip() in leaf_keys():  # a table replaces that of the key
                values = _merged(values, _nested(names, None))
            values = _merged(values, _nested(names, value))
    config = None
    try:
        config = Config.model_validate(_at_home(values), strict=True)
    except ValidationError as error:
        problems += [line for details in error.errors(include_url=False) for line in _problems(details)]
    if config is not None:
        problems += contradictions(config)
    if config is None or problems:
        source = " with ".join([*map(str, recipes), *["overrides"] * bool(overrides)]) or "the defaults"
        raise ConfigError("\n  ".join([f"{len(problems)} problem(s) in {source}:", *problems]))
    return config


LARGEST_RECIPE = 1 << 24
"""Bytes; the whole file is read."""

LONGEST_KEY = 200
"""Characters of a key beyond which it is not compared with ours: that takes minutes for a long text."""


def _read(path: Path) -> dict[str, Any]:
    try:
        is_file = path.is_file()
    except OSError as error:  # such as a name that the file system does not take
        raise ConfigError(f"recipe {_shown(str(path))} cannot be read: {error.strerror}") from error
    if not is_file and (packaged := packaged_recipe(path)):
        path, is_file = packaged, True
    if not is_file:
        near = sorted(str(p) for p in path.parent.glob("*.toml"))
        raise ConfigError(
            f"recipe {path} {'is not a file' if path.exists() else 'does not exist'}; "
            + (f"recipes in {path.parent}: {', '.join(near)}" if near else f"there are no recipes in {path.parent}")
        )
    try:
        if (size := path.stat().st_size) > LARGEST_RECIPE:
            raise ConfigError(f"{path}: has {size:,} bytes, more than any recipe")
        text = path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
        return _tuples(tomllib.loads(text))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the recipe as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: values are nested too deeply; a key needs at most one array") from error
    except tomllib.TOMLDecodeError as error:
        reason = str(error).replace("Cannot overwrite a value", "this key already has a value: each key once")
        if found := re.search(r" \(at line (\d+), column \d+\)", reason):
            line = int(found[1])
            shown = text.splitlines()[line - 1].strip() if line <= len(text.splitlines()) else ""
            raise ConfigError(f"{path}, line {line}: {reason.replace(found[0], '')}: {shown}") from error
        raise ConfigError(f"{path}: {reason}") from error
    except ValueError as error:  # of int(), for more digits than Python converts
        raise ConfigError(f"{path}: a number has too many digits: {error}") from error


def _override_value(key: str, text: str) -> Any:
    if holds_text(key) and not text.startswith(('"', "'")):
        return text  # also 2024 and true, if the key holds text
    try:
        return _tuples(tomllib.loads(f"value = {text}"))["value"] if "\n" not in text else text
    except (ValueError, RecursionError):  # not TOML, or a number with more digits than Python converts
        return text


def _nested(names: Sequence[str], value: Any) -> dict[str, Any]:
    return {names[0]: _nested(names[1:], value) if names[1:] else value}


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _at_home(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the home directory for a leading ~ of paths: a shell leaves that of KEY=~/PATH."""
    for key in (*DIRECTORIES, *FILES):
        section, _, name = key.partition(".")
        value = values[section].get(name) if isinstance(values.get(section), dict) else None
        found = tuple(map(_expanded, value)) if isinstance(value, tuple) else _expanded(value)
        if found != value:
            values = _merged(values, {section: {name: found}})
    return values


def _expanded(value: Any) -> Any:
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value


def _tuples(value: Any) -> Any:
    """Return the value with TOML's arrays as tuples, which are immutable."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _problems(details: Any) -> list[str]:
    """Return one line for an error of pydantic; several for an unknown section with keys of other frameworks."""
    key, value = ".".join(str(part) for part in details["loc"] if part != "[key]"), details["input"]
    match details["type"]:
        case "extra_forbidden":
            return _unknown(key, value)
        case "model_type":
            first = next(name for name in leaf_keys() if name.startswith(f"{key}."))
            reason = f"expected a section; set one of its keys, such as {first}"
        case "tuple_type":
            reason = 'expected an array, as in ["a", "b"]'
        case "dict_type":
            reason = "expected a table, as in {key = 'value'} (with quotes)"
        case "value_error":  # raised by our validators
            reason = str(details["ctx"]["error"])
        case _:
            reason = re.sub("^Input should be (?=greater|less)", "expected a value ", details["msg"])
            reason = reason.replace("Input should be", "expected")
            reason = reason.replace("String should have at least 1 character", "expected a text that is not empty")
    return [f"{key}={_shown(value)} is invalid: {reason}"]


def _unknown(name: str, value: Any) -> list[str]:
    """Return one line for each unknown key, or for an unknown section, with the name to write instead."""
    leaves = _leaves(name, value)
    if longest := max((leaf for leaf in leaves if len(leaf) > LONGEST_KEY), key=len, default=None):
        return [f"{_shown(longest)}: no such key; it has {len(longest)} characters"]
    nearest = None
    if isinstance(value, dict) and not any(map(keys_of_alias, leaves)):
        nearest = nearest_key(name, [section for section, _ in sections() if section])
    if nearest or not leaves:
        return [f"{name}: no such section; {_hint(nearest)}"]
    return [
        f"{leaf}: no such key; {_describe_keys(keys_of_alias(leaf)) or _hint(nearest_key(leaf))}" for leaf in leaves
    ]


def _shown(value: Any) -> str:
    """Return the repr of a value, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _hint(nearest: str | None) -> str:
    return f"did you mean {nearest}?" if nearest else "`hybridflow config --reference` lists all keys"


def _leaves(name: str, value: Any) -> list[str]:
    """Return the dotted names of all values in a table; only `name` if it is an alias or not a table."""
    if not isinstance(value, dict) or keys_of_alias(name):
        return [name]
    return [leaf for key, item in value.items() for leaf in _leaves(f"{name}.{key}", item)]


def _describe_keys(keys: Sequence[str]) -> str:
    if len(keys) < 2:
        return f"the key here is {keys[0]}" if keys else ""
    return f"the keys here are {', '.join(keys[:-1])} and {keys[-1]}"


PACKAGED = Path(str(files("hybridflow").joinpath("recipes")))
ALGORITHMS = PACKAGED / "algorithms"


def packaged_recipe(name: str | Path) -> Path | None:
    """Return the file of a name such as "dapo", or of a path such as recipes/countdown_grpo.toml; None for another."""
    text = str(name)
    if re.fullmatch(r"[A-Za-z0-9_-]+", text):
        file = ALGORITHMS / f"{text.replace('-', '_')}.toml"
    elif text.startswith("recipes/") and ".." not in Path(text).parts:
        file = PACKAGED / text.removeprefix("recipes/")
    else:
        return None
    return file if file.is_file() else None


def algorithm_names() -> list[str]:
    """Return the names of the recipes of algorithms."""
    return sorted(path.stem for path in ALGORITHMS.glob("*.toml"))
