"""What a check found."""

from typing import Literal, NamedTuple

State = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """The result of a check. `text`: what was seen; `fix`: what to do, empty if `state` is "ok".

    "warning": runs work, but not all of them, or slowly. "error": no run works, or none of some kind.
    """

    name: str
    state: State
    text: str
    fix: str = ""
