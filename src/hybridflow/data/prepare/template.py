"""Prompt templates: a text with {names}, where any other brace stands for itself."""

from collections.abc import Mapping, Sequence

from hybridflow.errors import DataConfigError


def fill_template(template: str, values: Mapping[str, str], required: Sequence[str]) -> str:
    """Replace each {name} by its value; `DataError` where a required one is not in the template."""
    missing = [f"{{{name}}}" for name in required if f"{{{name}}}" not in template]
    if missing:
        known = ", ".join(f"{{{name}}}" for name in values)
        raise DataConfigError(f"prompt_template={template!r} lacks {' and '.join(missing)}; it may hold {known}.")
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", value)
    return template
