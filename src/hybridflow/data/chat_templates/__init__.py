"""Chat templates for models whose own one lacks tools, or that have none: the values of `model.chat_template`."""

from pathlib import Path

from hybridflow.errors import DataConfigError

NAMES = tuple(sorted(file.stem for file in Path(__file__).parent.glob("*.jinja")))
"""The names of the templates of this package."""


def chat_template_of(value: str) -> str:
    """Return the text of a chat template, given as a name of NAMES, a file, or the text itself.

    Raises DataConfigError for a name or a file that does not exist.
    """
    if "{" in value:
        return value
    file = Path(__file__).parent / f"{value}.jinja" if value in NAMES else Path(value)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataConfigError(
            f"model.chat_template={value!r} is neither one of {', '.join(NAMES)} nor a file that can be read "
            f"({getattr(error, 'strerror', None) or error})."
        ) from error
    if "{" not in text:
        raise DataConfigError(f"model.chat_template={value!r} is not a template of Jinja: it writes no message.")
    return text
