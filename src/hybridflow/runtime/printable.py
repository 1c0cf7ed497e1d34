"""Text from the files of a run, which a terminal must not obey."""


def printable(text: object) -> str:
    """Return a text in one line, with control characters, changes of direction and broken UTF-8 as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))
