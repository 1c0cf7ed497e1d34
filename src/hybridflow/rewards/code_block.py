"""Finds the program in a response: its last complete block of Python between fences."""

import re
import textwrap

_FENCE = re.compile(r"[ \t>]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)")
_PYTHON = ("py", "python", "python3")


def last_code_block(text: str) -> str | None:
    """The last block that is said to be Python, else the last of no language, or None; a block without an end is none.

    A fence is three or more backticks or tildes, ended by as many, also behind the last line of the program.
    """
    of_python: str | None = None
    of_none: str | None = None
    fence = language = ""
    lines: list[str] = []
    for line in text.split("\n"):
        if not fence:
            match = _FENCE.match(line)
            if match:
                fence, lines = match["fence"], []
                language = (match["info"].split() or [""])[0].strip("{}.").lower()
            continue
        stripped = line.strip()
        is_end = stripped.startswith(fence) and not stripped.strip(fence[0])
        if not is_end and not (stripped.endswith(fence) and fence[0] == "`" and stripped.count(fence) == 1):
            lines.append(line)
            continue
        if not is_end:
            lines.append(line.rstrip().removesuffix(fence))
        program = textwrap.dedent("\n".join(lines))
        if language in _PYTHON:
            of_python = program
        elif not language:
            of_none = program
        fence = ""
    return of_none if of_python is None else of_python
