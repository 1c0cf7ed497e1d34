"""Import of user functions from a file or a module.

It needs only the standard library, since a process that runs such a function loads only this file.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

_MAX_TEXT_CHARS = 2000
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def load_user_function(name: str, what: str, error: type[Exception], is_class: bool = False) -> Callable[..., Any]:
    """Return the function, or the class, named by 'path/to/file.py:function' or 'package.module:function'.

    Raises `error`, with `what` the function is for ("reward function"), if the file, module or function does not
    exist, or if the import raises anything; that is the cause of the error.
    """
    kind, plural, form = ("class", "classes", "Class") if is_class else ("function", "functions", "function")
    source, _, function_name = name.rpartition(":")
    if not source or not function_name:
        raise error(f"{what} {name!r} is invalid; write 'path.py:{form}' or 'module:{form}'.")
    try:
        module = _load_file(source) if source.endswith(".py") else _load_module(source)
    except ValueError as problem:
        raise error(f"{what} {name!r}: {problem}") from problem.__cause__
    function = getattr(module, function_name, None)
    if not callable(function):
        offered = getattr(module, "__all__", None)
        available = [
            key
            for key, value in vars(module).items()
            if (inspect.isclass(value) or inspect.iscoroutinefunction(value) if is_class else inspect.isfunction(value))
            and not key.startswith("_")
            and (offered is None or key in offered)
            and (not is_class or value.__module__ == module.__name__)
        ]
        raise error(
            f"{what} {name!r}: {source} has no {kind} '{function_name}'; "
            f"it has {', '.join(available) or f'no {plural}'}."
        )
    return function


def require_arguments(
    function: Callable[..., Any], name: str, what: str, arguments: Sequence[str], error: type[Exception]
) -> None:
    """Raise `error` if the function cannot be called with these keyword arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions have no signature
        return
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as problem:
        plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        signature = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
        unknown = [each.name for each in plain if each.name not in arguments and each.kind not in _VARIADIC]
        raise error(
            f"{what} {name!r} is {getattr(function, '__name__', 'it')}{signature}{did_you_mean(unknown, arguments)}, "
            f"but it is called with the keyword arguments {', '.join(arguments)} ({problem})."
        ) from problem


def did_you_mean(names: Iterable[str], valid: Iterable[str]) -> str:
    """Return " (did you mean 'scores' instead of 'score'?)" for the names near a valid one; empty if there are none."""
    nearest = {name: get_close_matches(name, valid, n=2) for name in names}
    hints = [f"{' or '.join(map(repr, near))} instead of {name!r}" for name, near in nearest.items() if near]
    return f" (did you mean {', '.join(hints)}?)" if hints else ""


def _load_module(source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except BaseException as error:  # a user's module may raise anything
        raise ValueError(f"importing {source} failed: {_text_of(error)}") from error


def _load_file(source: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}.")
    # A unique name, so that files of the same name do not replace each other or an installed module.
    module_name = f"_hybridflow_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # a user's file may raise anything
        sys.modules.pop(module_name, None)
        raise ValueError(f"running {path} failed: {_text_of(error)}") from error
    return module


def _text_of(error: BaseException) -> str:
    """Return the type and the text of an exception, also of one whose own conversion to text fails."""
    try:
        return f"{type(error).__name__}: {error}"[:_MAX_TEXT_CHARS]
    except BaseException as problem:  # a user's class may raise anything
        return f"an exception whose text is missing: __str__ raised {type(problem).__name__}"
