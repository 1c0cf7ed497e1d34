"""Reads a configuration of verl and makes a recipe of it."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.cli.migration.verl import DEFAULTS, IGNORED, MARK, MOVES, SETTLED, NoEqualError, finish
from hybridflow.config.render import toml_value
from hybridflow.errors import ConfigError
from hybridflow.runtime.plain_files import require_text_file

MAX_BYTES = 2**20
_UNRESOLVED = re.compile(r"[$`]|\?\?\?|\{\{|^$|^<.*>$|^~\w+\.")
_KEY = re.compile(r"--.*|\+{0,2}[A-Za-z_][\w.]*\.[\w.]+", re.DOTALL)
_STANDS_FOR_OTHERS = re.compile(r"\+{0,2}(?:\$[\w{(]|`|[\w.]+\.[\w.]*[$`]).*|~\w+\.[\w.]+", re.DOTALL)
"""Words of a command such as ${ARGS[@]}, $(cat args), actor.${KEY}=1, and ~data.shuffle, which removes a key."""


@dataclass(frozen=True)
class Converted:
    """A recipe: our keys and values; `left_out`: a line for each thing that was not carried over."""

    values: Mapping[str, Any]
    left_out: list[str]

    def recipe(self) -> str:
        """Return the recipe as TOML, with what was left out as comments."""
        sections: dict[str, list[str]] = {}
        for key, value in self.values.items():
            section, _, name = key.rpartition(".")
            sections.setdefault(section, []).append(f"{name} = {toml_value(value)}")
        parts = ["\n".join([f"[{section}]", *lines]) for section, lines in sorted(sections.items())]
        head = ["# From a configuration of verl. Not carried over:"]
        head += [f"#   {_one_line(line)}" for line in self.left_out] or ["#   nothing"]
        return "\n\n".join(["\n".join(head), *parts]) + "\n"


def convert(file: str | Path) -> Converted:
    """Return the recipe of a YAML file, or of the `key=value` words in a shell script.

    Defaults of verl that differ from ours are part of the recipe. Raises ConfigError for a file that cannot be read or
    that has no key of verl.
    """
    path = Path(file)
    theirs = _read(path)
    if not any(key.startswith(MARK) for key in theirs):
        raise ConfigError(
            f"{path} has no key of verl's PPO trainer ({MARK}*), and other configurations are not converted; "
            "docs/coming_from.md has the keys of TRL and OpenRLHF with ours."
        )
    unread = {key for key, value in theirs.items() if _is_unresolved(value)}
    defaults = {key: value for key, value in DEFAULTS.items() if not any(key.startswith(f"{all_}.") for all_ in unread)}
    theirs = {**defaults, **theirs}
    values: dict[str, Any] = {}
    left_out = [_unread(key, theirs[key]) for key in theirs if key in unread]
    known = {*MOVES, *IGNORED, *SETTLED, *DEFAULTS}
    left_out += [f"{key}={value}" for key, value in theirs.items() if key not in known and key not in unread]
    for key in (key for key in MOVES if key in theirs):  # of clip_ratio and clip_ratio_low, the latter counts
        value = theirs[key]
        if key in unread:
            values = {ours: value for ours, value in values.items() if ours not in MOVES[key].keys}
            continue
        try:
            moved = MOVES[key].value(value)
        except NoEqualError as error:
            if str(error):
                left_out.append(f"{key}={value} has no equal here ({error})")
            continue
        values |= dict.fromkeys(MOVES[key].keys, moved)
    try:
        left_out += finish(values, {key: value for key, value in theirs.items() if key not in unread}, unread)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: a value has another type than verl documents: {error}.") from error
    return Converted(values, left_out)


def _is_unresolved(value: Any) -> bool:
    """Return whether a value is not there yet: $A, ${a.b}, `date`, ???, {{ name }}, <name>, or nothing."""
    return _UNRESOLVED.search(str(value)) is not None


def _unread(key: str, value: Any) -> str:
    ours = MOVES[key].keys if key in MOVES else SETTLED.get(key, ())
    what = "is a part of the script's command that was not read" if key == str(value) else "holds a variable"
    what = what if str(value) else "has no value"
    return f"{key if key == str(value) else f'{key}={value}'} {what}" + (f"; set {' and '.join(ours)}" if ours else "")


def _read(path: Path) -> dict[str, Any]:
    try:
        require_text_file(path)
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES:,} bytes, which no configuration has.")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    found = _flat(_yaml(path, text)) if path.suffix in (".yaml", ".yml") else _arguments(path, text)
    if not found:
        raise ConfigError(f"{path} has no key=value; give a YAML file, or a script with the arguments.")
    return found


def _yaml(path: Path, text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {_one_line(str(error))}.") from error


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: _number(value)} if prefix else {}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _number(value: Any) -> Any:
    """Return texts such as 1e-6, which YAML takes for texts, as numbers."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def _arguments(path: Path, text: str) -> dict[str, Any]:
    """Return the `key=value` and `--flag=value` arguments of a shell script, and what of it stands for others."""
    try:
        plain = re.sub(r"`#[^`]*`", "", text)  # a comment inside a command
        words = shlex.shlex(plain.replace("\\\n", " "), posix=True, punctuation_chars=";<>|&")
        words.whitespace_split = True
        arguments = list(words)
    except ValueError as error:
        raise ConfigError(f"{path} is not a shell script: {error}.") from error
    found: dict[str, Any] = {}
    for word in arguments:
        argument = re.sub(r"^\w+\+?=\(", "", word)  # the first and the last of an array
        argument = argument if "(" in argument else argument.rstrip(")")
        key, equals, value = argument.partition("=")
        if equals and (_KEY.fullmatch(key) or (value.startswith("{") and key.isidentifier())):
            found[key.lstrip("+")] = _value(value)
        elif _STANDS_FOR_OTHERS.fullmatch(argument):
            found[argument] = argument
    return found


def _value(text: str) -> Any:
    import yaml

    if _is_unresolved(text):
        return text
    try:
        return _number(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
