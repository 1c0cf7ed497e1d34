"""Downloads that write only inside the cache of the hub, whatever names the hub sends.

The hub's library makes file names of what a hub answers: of headers such as `ETag`, of commits and of listings.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

_PATHS = {"os.mkdir": 1, "os.remove": 1, "os.chmod": 1, "os.truncate": 1, "os.rename": 2, "os.symlink": 2, "os.link": 2}
"""Events of Python's audit that change files, and how many paths each one begins with; `open` is another one."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_roots: list[str] = []
"""The caches of the downloads that run now, as they are named and, where links lead to another disk, as they are."""


@contextmanager
def inside_cache() -> Iterator[None]:
    """Let huggingface_hub change no file outside its cache meanwhile: a try raises ValueError, before it is made."""
    from huggingface_hub import constants

    _watch()
    cache = os.path.expanduser(constants.HF_HUB_CACHE)
    roots = os.path.abspath(cache), os.path.realpath(cache)
    _roots.extend(roots)
    try:
        yield
    finally:
        for root in roots:
            _roots.remove(root)


def require_inside(path: str) -> None:
    """Raise ValueError for a path outside the caches of the downloads that run now; `..` counts, links do not."""
    if not any(os.path.commonpath([root, os.path.abspath(path)]) == root for root in _roots):
        raise ValueError(f"the hub answered with a name that leads out of the cache, to '{path}'")


@cache
def _watch() -> None:
    sys.addaudithook(_audit)  # for as long as the process lives: Python has no way to remove one


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _roots:
        return
    changes = int(arguments[2] & _WRITING != 0) if event == "open" else _PATHS.get(event, 0)
    if not changes or isinstance(arguments[changes - 1], int) or not _is_of_the_hub(sys._getframe()):
        return
    path = os.fsdecode(arguments[changes - 1])
    if os.path.isabs(path):  # others are those of a directory's descriptor
        require_inside(path)
        if event == "os.symlink":
            require_inside(os.path.join(os.path.dirname(path), os.fsdecode(arguments[0])))


def _is_of_the_hub(frame: FrameType | None) -> bool:
    """Return whether the library of the hub is among the callers; an import that caches its bytecode is not its."""
    while frame:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in ("huggingface_hub", "importlib", "_frozen_importlib_external"):
            return package == "huggingface_hub"
        frame = frame.f_back
    return False
