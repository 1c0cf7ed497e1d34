"""Chat templates for models whose own one lacks tools, or that have none: the values of `model.chat_template`."""

import re
from pathlib import Path

from hybridflow.errors import DataConfigError
from hybridflow.runtime.plain_files import require_text_file

NAMES = tuple(sorted(file.stem for file in Path(__file__).parent.glob("*.jinja")))
"""The names of the templates of this package."""

_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""The statement that transformers adds to Jinja."""


def chat_template_of(value: str) -> str:
    """Return the text of a chat template, given as a name of NAMES, a file, or the text itself.

    Raises DataConfigError for a name or a file that does not exist, and for a text with an error of syntax.
    """
    if "{" in value:
        return value
    file = Path(__file__).parent / f"{value}.jinja" if value in NAMES else Path(value)
    from jinja2 import Environment, TemplateSyntaxError  # not needed at most starts

    try:
        require_text_file(file)
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataConfigError(
            f"model.chat_template={value!r} is neither one of {', '.join(NAMES)} nor a file that can be read "
            f"({getattr(error, 'strerror', None) or error})."
        ) from error
    if "{" not in text:
        raise DataConfigError(f"model.chat_template={value!r} is not a template of Jinja: it writes no message.")
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))
    except TemplateSyntaxError as error:
        raise DataConfigError(f"model.chat_template={value!r}, line {error.lineno}: {error.message}.") from error
    return text
