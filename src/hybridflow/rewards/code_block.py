"""Extraction of the program in a response: its last complete fenced block of Python."""

import re
import textwrap

_FENCE = re.compile(r"[ \t>]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)")
_PYTHON = ("py", "python", "python3")


def last_code_block(text: str) -> str | None:
    """Return the last block labeled as Python, else the last unlabeled block, else None.

    A fence is three or more backticks or tildes. It is closed by as many, which may follow the last line of the program
    on the same line. A block that is not closed does not count.
    """
    labeled: str | None = None
    unlabeled: str | None = None
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
            labeled = program
        elif not language:
            unlabeled = program
        fence = ""
    return unlabeled if labeled is None else labeled
