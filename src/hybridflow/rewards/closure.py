"""A reward function that a Python program holds: it travels to its processes by value, and is never stored.

Its name, "closure:NAME-HASH", stands in the configuration. The hash is that of its source, so that a run that continues
with another function is noticed.
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

import cloudpickle

from hybridflow.errors import RewardConfigError

SOURCE = "closure"
MAX_BYTES = 2**28
"""Size of a function with what it holds; each process gets a copy."""


@dataclass(frozen=True)
class Closure:
    """A function by value: its name in the configuration, its pickle, and where its process looks for modules."""

    name: str
    contents: bytes
    paths: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Closure":
        """Return a function by value. Raises RewardConfigError for one that holds what cannot travel."""
        name = getattr(function, "__name__", type(function).__name__)
        for variable, value in _held(function):
            if getattr(value, "is_cuda", False) is True:
                raise RewardConfigError(
                    f"the reward function '{name}' holds the tensor '{variable}' on a GPU, which its processes do not "
                    "have; give it a tensor on the CPU, or load it inside the function."
                )
        try:
            contents = cloudpickle.dumps(function)
        except Exception as error:  # of any type, by what the function holds
            held = ", ".join(variable for variable, value in _held(function) if not _can_travel(value))
            raise RewardConfigError(
                f"the reward function '{name}' cannot travel to its processes: {type(error).__name__}: {error}"
                f"{f'; it holds {held}' if held else ''}. Make such objects inside the function (locks, open files, "
                "connections), or write the function to a file: reward='path.py:function'."
            ) from error
        if len(contents) > MAX_BYTES:
            raise RewardConfigError(
                f"the reward function '{name}' holds {len(contents):,} bytes, of which each of its processes would get "
                f"a copy; at most {MAX_BYTES:,} can travel. Load large data inside the function."
            )
        return cls(f"{SOURCE}:{re.sub(r'[^A-Za-z0-9_]', '', name)}-{source_hash(function)}", contents, (*sys.path,))

    def function(self) -> Callable[..., Any]:
        """Return the function, in this process."""
        sys.path += [path for path in self.paths if path not in sys.path]
        return cloudpickle.loads(self.contents)


_offered: dict[str, Closure] = {}


def offer(closure: Closure) -> None:
    """Let the runs that this process builds from now on use a function by its name."""
    _offered[closure.name] = closure


def closure_of(name: str) -> Closure | None:
    """Return the function of a name in the configuration, None for a name of a file, a module or nothing.

    Raises RewardConfigError for a function that this process does not hold.
    """
    if not is_closure(name):
        return None
    if name not in _offered:
        raise RewardConfigError(
            f"reward.function='{name}' was a function of a Python program, which is never stored; give it again, as in "
            "hybridflow.open_run(RUN_DIR, reward=...).resume(), or write it to a file and set reward.function to "
            "'path.py:function'."
        )
    return _offered[name]


def is_closure(name: str) -> bool:
    """Return whether a name in the configuration is that of a function of a Python program."""
    return name.startswith(f"{SOURCE}:")


def source_hash(function: Callable[..., Any]) -> str:
    """Return a digest of the source of a function, or of its code where there is no source."""
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.unwrap(function)
    defined = plain if inspect.isroutine(plain) else type(plain)
    try:
        text = textwrap.dedent(inspect.getsource(defined))
    except (OSError, TypeError):
        code = getattr(plain, "__code__", None)
        text = repr((code.co_code, code.co_names, _constants(code))) if code else repr(defined)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def _constants(code: Any) -> list[Any]:
    """Return the constants of a code; of a code inside it only the code, whose text has an address."""
    return [constant.co_code if inspect.iscode(constant) else constant for constant in code.co_consts]


def _held(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the variables outside of a function that it uses, and the arguments that it is bound to."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {i}", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from _held(function.func)
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
