"""The parameters of a function in a file, read without running the file, which may be slow or may fail."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any


def declared_function(name: str) -> Callable[..., Any] | None:
    """Return a function that does nothing, with the parameters of 'path/to/file.py:function', whose code does not run.

    None for what is not a plain `def` of a file: only running it shows its parameters.
    """
    source, _, function_name = name.rpartition(":")
    try:
        tree = ast.parse(Path(source).expanduser().read_bytes()) if source.endswith(".py") else None
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # loading it says so
        return None
    found = [each for each in (tree.body if tree else ()) if getattr(each, "name", None) == function_name]
    if not found or not isinstance(found[-1], ast.FunctionDef | ast.AsyncFunctionDef) or found[-1].decorator_list:
        return None
    given = found[-1].args
    for each in ast.walk(given):
        if isinstance(each, ast.arg):
            each.annotation = None
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [each and ast.Constant(None) for each in given.kw_defaults]
    return eval(f"lambda {ast.unparse(given)}: None")
