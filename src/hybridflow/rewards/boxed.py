r"""Finds what a response put into \boxed{...}."""

import re

_TOKEN = re.compile(r"(\\boxed\s*\{)|\\.|[{}]", re.DOTALL)


def last_boxed_span(text: str) -> tuple[int, int] | None:
    r"""Where the content of the last \boxed{...} whose braces balance starts and ends; time is linear in the text."""
    open_braces: list[int | None] = []  # where the content starts, for those of a box
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
    r"""The stripped content of the last \boxed{...} whose braces balance, or None."""
    span = last_boxed_span(text)
    return None if span is None else text[slice(*span)].strip()
