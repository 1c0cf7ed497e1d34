"""What user code is and has raised, as texts: safe for objects whose own methods fail. Only the standard library."""

import contextlib
import hashlib
import inspect
import linecache
import os
import traceback
from typing import Any


def returns_awaitable(function: Any) -> bool:
    """Return whether the function, the called object or the wrapped function is `async`."""
    call = vars(type(function)).get("__call__")
    return any(map(inspect.iscoroutinefunction, (function, call, inspect.unwrap(function))))


def source_of(function: Any) -> str:
    """Return a digest of the file that defines a function; empty if there is none."""
    with contextlib.suppress(OSError), open(_file_of(function), "rb") as file:
        return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    return ""


def described(error: BaseException, function: Any) -> str:
    """Return the type and text of an exception, and the innermost line of the function's file that raised it.

    Errors of hybridflow's built-in functions have no line: their texts say what to fix.
    """
    try:
        text, file = f"{type(error).__name__}: {text_of(error)}"[:2000], _file_of(function)
        frames = traceback.walk_tb(error.__traceback__)
        lines = [(line, frame.f_code.co_name) for frame, line in frames if frame.f_code.co_filename == file]
    except BaseException as problem:  # a user's class may fail in any of its methods
        return f"an exception that cannot be shown (showing it raised {type(problem).__name__})"
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not lines or os.path.dirname(os.path.dirname(file)) == ours:
        return text
    line, name = lines[-1]
    source = linecache.getline(file, line).strip()[:200]
    return f"{text} at {file}:{line}, in {name}" + (f": `{source}`" if source else "")


def text_of(error: BaseException) -> str:
    """Return the text of an exception, also of one whose own conversion to text fails."""
    try:
        return str(error)
    except BaseException as problem:
        return f"(its text is missing: __str__ raised {type(problem).__name__})"


def _file_of(function: Any) -> str:
    """Return the file that defines a function, a partial function or a callable object; empty if there is none."""
    function = inspect.unwrap(getattr(function, "func", function))
    for definition in (function, type(function)):
        with contextlib.suppress(TypeError, OSError):
            return inspect.getfile(definition)
    return ""
