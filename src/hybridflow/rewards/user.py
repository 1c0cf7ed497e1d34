"""Loads a reward function of the user's own, from a file or a module."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from hybridflow.errors import RewardError
from hybridflow.rewards.table import RewardFunction

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(name: str) -> RewardFunction:
    """The function that 'path/to/file.py:function' or 'package.module:function' names.

    Raises `RewardError` if there is no such file, module or function, if the code fails on import, or if the function
    cannot be called with the keyword arguments data_source, solution_str, ground_truth, extra_info.
    """
    source, _, function_name = name.rpartition(":")
    if not source or not function_name:
        raise RewardError(f"reward function {name!r}: write 'path.py:function' or 'module:function'.")
    module = _load_file(source, name) if source.endswith(".py") else _load_module(source, name)
    function: RewardFunction | None = getattr(module, function_name, None)
    if not callable(function):
        available = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")
        ]
        raise RewardError(
            f"reward function {name!r}: {source} has no function '{function_name}'; "
            f"it has {', '.join(available) or 'no functions'}."
        )
    check_signature(function, name)
    return function


def check_signature(function: RewardFunction, name: str) -> None:
    """`RewardError` if the function cannot take the four keyword arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions have none to look at
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise RewardError(
            f"reward function {name!r} is {getattr(function, '__name__', 'it')}{signature}, but it is called with the "
            f"keyword arguments {', '.join(ARGUMENTS)} ({error})."
        ) from error


def _load_module(source: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything
        raise RewardError(
            f"reward function {name!r}: importing {source} failed: {type(error).__name__}: {error}"
        ) from error


def _load_file(source: str, name: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise RewardError(f"reward function {name!r}: there is no file {path}.")
    # A name of its own, so that two files of the same name do not replace each other or an installed module.
    module_name = f"_hybridflow_reward_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward function {name!r}: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a file of the user's may raise anything
        del sys.modules[module_name]
        raise RewardError(
            f"reward function {name!r}: running {path} failed: {type(error).__name__}: {error}"
        ) from error
    return module
