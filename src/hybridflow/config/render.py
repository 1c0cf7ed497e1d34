"""A configuration as TOML that loads back equal, and the reference of all keys as text or Markdown."""

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hybridflow.config.checks import REFUSALS
from hybridflow.config.checks.refusal import is_command
from hybridflow.config.keys import sections
from hybridflow.config.sections.base import Section
from hybridflow.config.sections.config import Config


def to_toml(config: Config) -> str:
    """Return every key with its value, one table per section; `load_config` reads it back to an equal Config."""
    return _with_tables(config, lambda key, value, section: [f"{key} = {toml_value(value)}"])


def toml_value(value: Any) -> str:
    """Return one value as TOML; None, which TOML lacks, as the string "none"."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case None:
            return '"none"'
        case dict():
            return "{" + ", ".join(f"{_toml_key(name)} = {toml_value(item)}" for name, item in value.items()) + "}"
        case tuple():
            return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def reference_text() -> str:
    """Return every key with default, valid values and description, as commented TOML that is a recipe itself."""

    def lines(key: str, value: Any, section: Section) -> list[str]:
        meaning, valid = _describe(section, key)
        return [f"# {meaning}", f"# {valid}", f"{key} = {toml_value(value)}"]

    return _with_tables(Config(), lines)


def keys_text(keys: Iterable[str]) -> str:
    """Return some keys with defaults and descriptions, for the help of a command."""
    known = dict(sections())
    lines = []
    for key in keys:
        prefix, _, name = key.rpartition(".")
        section = known[prefix]
        lines.append(f"  {key} = {toml_value(getattr(section, name))}")
        lines.append(textwrap.fill(_describe(section, name)[0], 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def reference_markdown() -> str:
    """Return every key with default, valid values and description, as one Markdown table per section."""
    parts = []
    for name, section in sections():
        rows = []
        for key, value in section:
            if not isinstance(value, Section):
                meaning, valid = (text.replace("|", "\\|") for text in _describe(section, key))
                meaning = re.sub(r"\bdocs/((\w+)\.md)", r"[\2](\1)", meaning)
                rows.append(f"| `{name}.{key}` | {valid} | `{toml_value(value)}` | {meaning} |")
        if rows:
            parts.append("\n".join([f"### {name}\n", "| key | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def refusals_markdown() -> str:
    """Return the pairs of features that do not combine, and why, as a Markdown table."""
    rows = [f"| {_as_code(each.feature)} | {_as_code(each.other)} | {each.why} |" for each in REFUSALS]
    return "\n".join(["| these keys | with | why not |", "|---|---|---|", *rows]) + "\n"


def _as_code(feature: str) -> str:
    """Return the key, or the command, as code, and the values that follow a key as text."""
    key, *values = [feature] if is_command(feature) else feature.split(" ", 1)
    return " ".join([f"`{key}`", *values])


def _with_tables(config: Config, lines: Callable[[str, Any, Section], list[str]]) -> str:
    """Return the tables of all sections, with `lines(key, value, section)` for each key."""
    parts = []
    for name, section in sections(config):
        body = [line for key, value in section if not isinstance(value, Section) for line in lines(key, value, section)]
        if body:
            parts.append("\n".join([f"[{name}]", *body]))
    return "\n\n".join(parts) + "\n"


def _describe(section: Section, key: str) -> tuple[str, str]:
    """Return the description and the valid values of a key."""
    schema = type(section).model_json_schema()["properties"][key]
    return schema["description"], _valid(schema)


def _valid(schema: Mapping[str, Any]) -> str:
    if "shown" in schema:
        return schema["shown"]
    if "const" in schema or "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(_valid(option) for option in schema["anyOf"])
    match schema["type"]:
        case "null":
            return '"none"'
        case "object":
            return f"table of {_valid(schema['additionalProperties'])}"
        case "array" if "prefixItems" in schema:
            return f"[{', '.join(_valid(item) for item in schema['prefixItems'])}]"
        case "array":
            return f"array of {_valid(schema['items'])}"
    bounds = [
        f"{sign} {schema[bound]}"
        for bound, sign in (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))
        if bound in schema
    ]
    return " ".join([schema["type"], *([" and ".join(bounds)] if bounds else [])])
