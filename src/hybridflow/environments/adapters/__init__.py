"""Environments of other packages: a source "SCHEME:REST" in environment.classes.

The adapter of a scheme is a module with `make(rest)`, which returns a subclass of `Environment` (or an agent), and, if
the package has rows, `rows(rest, split, count, seed)`; `digest(rest)` if files define it, not the version of a package.
It is imported when a source of its scheme is used.
"""

import importlib
import json
from ast import literal_eval
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from hybridflow.config.environment_sources import SCHEMES, scheme_of
from hybridflow.environments.processes.user_errors import source_of
from hybridflow.errors import EnvironmentConfigError
from hybridflow.runtime.user_import import load_user_function

_MOST_ROWS = 10**8


def load(source: str, key: str, by_name: Callable[..., Any] = load_user_function) -> tuple[Any, str]:
    """Return the class (or agent) of a source, and a digest of what defines it: a file, or the version of a package.

    `by_name` loads 'path.py:Class' or 'module:Class'. Raises EnvironmentConfigError, which names `key`.
    """
    if not scheme_of(source):
        found = by_name(source, key, EnvironmentConfigError, is_class=True)
        return found, source_of(found)
    what = f"{key}={source!r}"
    adapter, digest, rest = _adapter(source, what)
    made = _asked(what, lambda: adapter.make(rest))
    return made, adapter.digest(rest) if hasattr(adapter, "digest") else digest


def rows_of(source: str, split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return up to `count` rows of a source, for "train" or "test": the same for the same seed.

    Raises EnvironmentConfigError for a source without rows.
    """
    if not scheme_of(source):
        raise EnvironmentConfigError(
            f"SOURCE={source!r} has no rows; expected an environment of gymnasium, harbor, reasoning-gym or verifiers."
        )
    what = f"SOURCE={source!r}"
    adapter, _, rest = _adapter(source, what)
    if not hasattr(adapter, "rows"):
        raise EnvironmentConfigError(
            f"{what} has no rows of its own; write a file with the column `prompt` (`hybridflow prepare table`)."
        )

    def rows() -> Iterator[dict[str, Any]]:
        for index, row in enumerate(islice(adapter.rows(rest, split, count, seed), count)):
            yield {**row, "extra_info": {"split": split, "index": index, **row.get("extra_info", {})}}

    return _asked(what, lambda: list(rows()))


def arguments_of(rest: str) -> tuple[str, dict[str, Any]]:
    """Return NAME and the arguments of 'NAME?key=value&key=value'; values are JSON, literals of Python, or texts."""
    name, _, query = rest.partition("?")
    arguments: dict[str, Any] = {}
    for each in filter(None, query.split("&")):
        argument, equals, value = each.partition("=")
        if not equals or not argument.isidentifier():
            raise EnvironmentConfigError(f"{each!r} is not an argument; write NAME?key=value&key=value.")
        arguments[argument] = _value_of(unquote(value))
    return name, arguments


def first_seed(split: str, seed: int) -> int:
    """Return the seed of the first row; the rows of other splits and seeds have others."""
    return (2 * seed + (split == "test")) * _MOST_ROWS


def _value_of(text: str) -> Any:
    for read in (json.loads, literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


def _adapter(source: str, what: str) -> tuple[ModuleType, str, str]:
    """Return the adapter of a source, the version of its package, and what follows the scheme."""
    scheme, _, rest = source.partition(":")
    module, package = SCHEMES[scheme]
    try:
        digest = f"{package} {version(package)}" if package else ""
    except PackageNotFoundError as error:
        raise EnvironmentConfigError(
            f"{what} needs the package {package}; install it: pip install 'hybridflow[agents]'."
        ) from error
    return _asked(what, lambda: importlib.import_module(module)), digest, rest


def _asked(what: str, ask: Callable[[], Any]) -> Any:
    """Return what a package returns. Raises EnvironmentConfigError if it raises."""
    try:
        return ask()
    except EnvironmentConfigError as error:
        raise EnvironmentConfigError(f"{what}: {error}") from error
    except Exception as error:  # of the package
        raise EnvironmentConfigError(f"{what}: {type(error).__name__}: {error}") from error
