"""Prompt templates: texts with {names}; other braces are kept."""

from collections.abc import Mapping, Sequence

from hybridflow.errors import DataConfigError


def fill_template(template: str, values: Mapping[str, str], required: Sequence[str]) -> str:
    """Return the template with each {name} replaced by its value; raise DataError if a required name is missing."""
    missing = [f"{{{name}}}" for name in required if f"{{{name}}}" not in template]
    if missing:
        known = ", ".join(f"{{{name}}}" for name in values)
        raise DataConfigError(f"prompt_template={template!r} lacks {' and '.join(missing)}; valid names are {known}.")
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", value)
    return template
