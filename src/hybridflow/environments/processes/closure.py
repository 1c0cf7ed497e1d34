"""A function or class that a Python program holds: it travels to its processes by value, and is never stored.

Its name, "closure:NAME-HASH", stands in the configuration. The hash is that of its source, so that a run that continues
with another one is noticed.
"""

import functools
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import cloudpickle

from hybridflow.errors import ConfigError, EnvironmentConfigError, RewardConfigError

SOURCE = "closure"
MAX_BYTES = 2**28
"""Size of a function with what it holds; each process gets a copy."""


@dataclass(frozen=True)
class Purpose:
    """What a closure is for, as errors say it: its kind, key of the configuration, argument in Python and its form.

    `override` is what a command needs in its place.
    """

    what: str
    key: str
    argument: str
    form: str
    override: str
    error: type[ConfigError]

    def __str__(self) -> str:
        return f"the {self.what}"


REWARD = Purpose(
    *("reward function", "reward.function", "reward", "path.py:function", "reward.function=path.py:function"),
    error=RewardConfigError,
)
ENVIRONMENT = Purpose(
    *("environment", "environment.classes", "environments", "path.py:Class"),
    override="""'environment.classes={NAME = "path.py:Class"}'""",
    error=EnvironmentConfigError,
)


@dataclass(frozen=True)
class Closure:
    """A function or class by value: its name in the configuration, its pickle, and where modules are looked for."""

    name: str
    contents: bytes
    paths: tuple[str, ...]
    purpose: Purpose = REWARD

    @classmethod
    def of(cls, function: Callable[..., Any], purpose: Purpose = REWARD) -> "Closure":
        """Return a function or class by value. Raises the error of its purpose if it holds what cannot travel."""
        name = getattr(function, "__name__", type(function).__name__)
        for variable, value in _held(function):
            if getattr(value, "is_cuda", False) is True:
                raise purpose.error(
                    f"{purpose} '{name}' holds the tensor '{variable}' on a GPU, which its processes do not "
                    "have; give it a tensor on the CPU, or load it inside."
                )
        try:
            contents = cloudpickle.dumps(function)
        except Exception as error:  # of any type, by what the function holds
            held = ", ".join(variable for variable, value in _held(function) if not _can_travel(value))
            raise purpose.error(
                f"{purpose} '{name}' cannot travel to its processes: {type(error).__name__}: {error}"
                f"{f'; it holds {held}' if held else ''}. Make such objects inside (locks, open files, connections), "
                f"or write it to a file: {purpose.argument}='{purpose.form}'."
            ) from error
        if len(contents) > MAX_BYTES:
            raise purpose.error(
                f"{purpose} '{name}' holds {len(contents):,} bytes, of which each of its processes would get "
                f"a copy; at most {MAX_BYTES:,} can travel. Load large data inside."
            )
        label = f"{SOURCE}:{re.sub(r'[^A-Za-z0-9_]', '', name)}-{source_hash(function)}"
        return cls(label, contents, (*sys.path,), purpose)

    def function(self) -> Any:
        """Return the function or class, in this process."""
        sys.path += [path for path in self.paths if path not in sys.path]
        return cloudpickle.loads(self.contents)


_offered: dict[str, Closure] = {}


def offer(closure: Closure) -> None:
    """Let the runs that this process builds from now on use a function or class by its name."""
    _offered[closure.name] = closure


def closure_of(name: str, purpose: Purpose = REWARD) -> Closure | None:
    """Return the function or class of a name in the configuration, None for that of a file, a module or nothing.

    Raises the error of its purpose for one that this process does not hold.
    """
    if not is_closure(name):
        return None
    if name not in _offered:
        raise purpose.error(
            f"{purpose.key}='{name}' was given by a Python program, which is never stored. For a command, write it to "
            f"a file and add {purpose.override} to the command; in Python, give it again: "
            f"hybridflow.open_run(RUN_DIR, {purpose.argument}=...)."
        )
    return _offered[name]


def is_closure(name: str) -> bool:
    """Return whether a name in the configuration is that of a function or class of a Python program."""
    return name.startswith(f"{SOURCE}:")


def source_hash(function: Callable[..., Any]) -> str:
    """Return a digest of the source of a function or class, or of its code where there is no source.

    It stays as it is while this process runs: a notebook's source is in memory only, and may be lost.
    """
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.unwrap(function)
    defined = plain if inspect.isroutine(plain) or inspect.isclass(plain) else type(plain)
    if defined not in _hashes:
        _hashes[defined] = hashlib.blake2b(_source(defined).encode(errors="surrogatepass"), digest_size=6).hexdigest()
    return _hashes[defined]


_hashes = WeakKeyDictionary[Any, str]()


def _source(defined: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(defined))
    except (OSError, TypeError):
        code = getattr(defined, "__code__", None)
    if code:
        return repr((code.co_code, code.co_names, _constants(code)))
    if not inspect.isclass(defined):
        return repr(defined)
    parts = [  # of a class without source, as in a notebook: its methods may have one
        f"{name}: {_source(inspect.unwrap(value)) if inspect.isfunction(value) else repr(value)}"
        for name, value in vars(defined).items()
        if inspect.isfunction(value) or type(value) in (int, float, str, bool, tuple)
    ]
    return "\n".join([defined.__name__, *parts])


def _constants(code: Any) -> list[Any]:
    """Return the constants of a code; of a code inside it only the code, whose text has an address."""
    return [constant.co_code if inspect.iscode(constant) else constant for constant in code.co_consts]


def _held(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the variables outside of a function or class that it uses, and the arguments that it is bound to."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {i}", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from _held(function.func)
        return
    if isinstance(function, type):
        for name, value in vars(function).items():
            if inspect.isfunction(value):
                yield from _held(value)
            elif not name.startswith("__"):
                yield name, value
        return
    try:
        variables = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):
        return
    yield from {**variables.nonlocals, **variables.globals}.items()


def _can_travel(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # of any type
        return False
    return True
