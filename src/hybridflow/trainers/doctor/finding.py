"""What a check found."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """The result of a check. `text`: what was seen; `fix`: what to do, empty if `state` is "ok".

    "warning": runs work, but not all of them, or slowly. "error": no run works, or none of some kind.
    """

    name: str
    state: Literal["ok", "warning", "error"]
    text: str
    fix: str = ""
