r"""Extraction of the content of \boxed{...}, which may be written \fbox{...}."""

import re

_TOKEN = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)


def last_boxed_span(text: str) -> tuple[int, int] | None:
    r"""Return (start, end) of the content of the last \boxed{...} with balanced braces, or None, in linear time."""
    open_braces: list[int | None] = []  # start of the content for the braces of a box, else None
    start = end = -1
    for token in _TOKEN.finditer(text):
        if token[1]:
            open_braces.append(token.end())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            opened = open_braces.pop()
            if opened is not None and opened > start:
                start, end = opened, token.start()
    return None if start < 0 else (start, end)


def last_boxed(text: str) -> str | None:
    r"""Return the stripped content of the last \boxed{...} with balanced braces, or None."""
    span = last_boxed_span(text)
    return None if span is None else text[slice(*span)].strip()
