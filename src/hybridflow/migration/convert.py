"""Reads a configuration of another framework and makes a recipe of it."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.render import toml_value
from hybridflow.errors import ConfigError
from hybridflow.migration.moves import Framework, NoEqualError
from hybridflow.migration.openrlhf import OPENRLHF
from hybridflow.migration.trl import TRL
from hybridflow.migration.verl import VERL

FRAMEWORKS = {"verl": VERL, "trl": TRL, "openrlhf": OPENRLHF}
MAX_BYTES = 2**20


@dataclass(frozen=True)
class Converted:
    """A recipe: our keys and values; `left_out`: a line for each thing that was not carried over; the framework."""

    values: Mapping[str, Any]
    left_out: list[str]
    framework: str

    def recipe(self) -> str:
        """Return the recipe as TOML, with what was left out as comments."""
        sections: dict[str, list[str]] = {}
        for key, value in self.values.items():
            section, _, name = key.rpartition(".")
            sections.setdefault(section, []).append(f"{name} = {toml_value(value)}")
        parts = ["\n".join([f"[{section}]", *lines]) for section, lines in sorted(sections.items())]
        head = [f"# From a configuration of {self.framework}. Not carried over:"]
        head += [f"#   {_one_line(line)}" for line in self.left_out] or ["#   nothing"]
        return "\n\n".join(["\n".join(head), *parts]) + "\n"


def convert(file: str | Path, framework: str = "") -> Converted:
    """Return the recipe of a YAML file, or of the arguments in a shell script; `framework` "": known by its keys.

    Defaults of the other framework that differ from ours are part of the recipe. Raises ConfigError for a file that
    cannot be read or that has no key of the framework.
    """
    path = Path(file)
    theirs = _read(path)
    chosen = FRAMEWORKS[framework] if framework else _framework_of(path, theirs)
    theirs = {chosen.names.get(key, key): value for key, value in theirs.items()}
    if chosen.needs and not theirs.keys() & {*chosen.needs}:
        raise ConfigError(
            f"{path} has no key of GRPO, such as {', '.join(chosen.needs[:3])}: it belongs to another trainer of "
            f"{chosen.name}. Only reinforcement learning is converted; for SFT, DPO and reward models write a few keys "
            "by hand, see `hybridflow sft --help`, `dpo --help` and `reward-model --help`."
        )
    values: dict[str, Any] = {}
    left_out: list[str] = []
    for key, value in {**chosen.defaults, **theirs}.items():
        if key not in chosen.moves:
            if key not in chosen.ignored and key not in chosen.defaults:
                left_out.append(f"{key}={value}")
            continue
        if isinstance(value, str) and "$" in value:
            left_out.append(f"{key}={value} holds a variable of the shell; set {' and '.join(chosen.moves[key].keys)}")
            continue
        try:
            moved = chosen.moves[key].value(value)
        except NoEqualError as error:
            if str(error):
                left_out.append(f"{key}={value} has no equal here ({error})")
            continue
        values |= dict.fromkeys(chosen.moves[key].keys, moved)
    try:
        left_out += chosen.finish(values, {**chosen.defaults, **theirs})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: a value has another type than {chosen.name} documents: {error}.") from error
    return Converted(values, left_out, chosen.name)


def _framework_of(path: Path, theirs: Mapping[str, Any]) -> Framework:
    for framework in FRAMEWORKS.values():
        if any(
            key.startswith(mark) if mark.endswith(".") else key == mark for mark in framework.marks for key in theirs
        ):
            return framework
    raise ConfigError(
        f"{path} has no key by which verl, TRL or OpenRLHF is known; name it: --from {', '.join(FRAMEWORKS)}."
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES:,} bytes, which no configuration has.")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    found = _flat(_yaml(path, text)) if path.suffix in (".yaml", ".yml") else _arguments(path, text)
    if not found:
        raise ConfigError(f"{path} has no key=value and no --flag; give a YAML file, or a script with the arguments.")
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
    """Return the `key=value` words and `--flags` of a shell script."""
    try:
        plain = re.sub(r"`#[^`]*`", "", text)  # a comment inside a command
        words = shlex.split(plain.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"{path} is not a shell script: {error}.") from error
    found: dict[str, Any] = {}
    flag = ""
    for word in words:
        key, equals, value = word.partition("=")
        if word == "--":
            flag = ""
        elif word.startswith("--"):
            flag = key.removeprefix("--").replace("-", "_")
            found[flag] = _value(value) if equals else True
            flag = "" if equals else flag
        elif re.fullmatch(r"\+{0,2}[A-Za-z_][\w.]*\.[\w.]+", key) and equals:
            found[key.lstrip("+")], flag = _value(value), ""
        elif flag:
            before = found[flag]
            so_far = [] if before is True else before if isinstance(before, list) else [before]
            found[flag] = [*so_far, _value(word)] if so_far else _value(word)
    return found


def _value(text: str) -> Any:
    import yaml

    if "$" in text:
        return text
    try:
        return _number(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
