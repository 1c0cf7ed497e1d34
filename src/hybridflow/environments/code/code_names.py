"""The names that a test by statements sees, and what is kept from the program; runs beside code_process.py."""

from __future__ import annotations

import _thread
import builtins
import sys
from types import CodeType, ModuleType

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

MAIN, MODULE = "__main__", "program"
SCALARS = frozenset({int, str, float, bool, bytes, complex, type(None)})
TOOLS = ("unittest", "doctest")
"""Modules of which a test has a copy of its own."""

_HOOKS = ("load_tests", "setUpModule", "tearDownModule")
"""Functions that unittest finds by their names; those of the program do not count."""

bases_of = type.__dict__["__mro__"].__get__

_FINDING = frozenset({"compile", "eval", "exec", "getattr", "globals", "locals", "vars"})
_HEAP_TYPE = 1 << 9
_getframe = sys._getframe


class TestNames(dict):
    """Global names of a test; a name that it does not define is the program's."""

    def __init__(self, program: dict[str, Any], own_builtins: dict[str, Any]) -> None:
        own = {"isinstance": is_instance, "map": _mapped} | own_builtins
        super().__init__(__name__=MODULE, __builtins__=vars(builtins) | own)
        self.program = program
        self._hidden: set[str] = set()

    def use(self, code: CodeType) -> None:
        """Prepare for a test.

        The name of a built-in function keeps its meaning, unless it is the only name of the program that the test uses,
        and not a function that could find others.
        """
        used = _names(code) & {name for name in self.program if type(name) is str and not name.startswith("__")}
        shared = {name for name in used if hasattr(builtins, name)}
        self._hidden = set() if used == shared - _FINDING and len(shared) == 1 else shared
        for name in used - self._hidden:
            if "__send__" not in code.co_names and callable(self.program[name]):
                self.setdefault(name, self.program[name])  # bodies of classes find only names that the dict has

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._hidden or self.program.get(name) is not value:  # `from program import *`
            super().__setitem__(name, value)

    def __missing__(self, name: str) -> Any:
        if name in self._hidden or name.startswith("__"):
            raise KeyError(name)
        return self.program[name]


def _names(code: CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


def is_instance(value: Any, kinds: Any) -> bool:
    """Return what `isinstance` does, except that a value cannot pretend to be of a built-in type."""
    if type(kinds) is tuple:
        return any(is_instance(value, kind) for kind in kinds)
    is_builtin = type(kinds) is type and not kinds.__flags__ & _HEAP_TYPE
    return isinstance(value, kinds) and (not is_builtin or kinds in bases_of(type(value)))


def _mapped(function: Any, *iterables: Any) -> Iterator[Any]:
    """Yield what `map` does, but do not take an error of the function for the end."""
    for each in zip(*iterables, strict=False):
        yield function(*each)


class TestModule(ModuleType):
    """The module `__main__` for a test, in which unittest finds its classes."""

    def __init__(self, names: TestNames) -> None:
        super().__init__(MAIN)
        vars(self)["_names"] = names

    def __dir__(self) -> list[str]:
        names = self._names
        return [name for name, value in names.items() if names.program.get(name, names) is not value]

    def __getattr__(self, name: str) -> Any:
        if name in _HOOKS and name not in dir(self):
            raise AttributeError(name)
        try:
            return self._names[name]
        except KeyError:
            raise AttributeError(name) from None


class StandIn(ModuleType):
    """A module whose functions and numbers are those before the program ran; what the test sets, the program sees."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        saved = {name: value for name, value in vars(module).items() if callable(value) or type(value) in SCALARS}
        vars(self).update({name: value for name, value in saved.items() if value is not None}, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)
        vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)
        vars(self).pop(name, None)


def load(imports: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Import what a test imports; what is missing is missed when the test runs."""
    for name, attributes in imports:
        try:
            __import__(name, fromlist=(*attributes,))
        except Exception:
            continue


_WATCHED = frozenset(
    {
        *("sys._getframe", "sys.settrace", "sys.setprofile", "sys._current_frames", "sys._current_exceptions"),
        *("sys.addaudithook", "sys.monitoring.register_callback"),
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
    }
)
_FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
_INSPECTING = frozenset({"inspect", "traceback", "logging", "asyncio.base_tasks", "bdb", "pdb", "trace", "ctypes"})


def guard_of(program_builtins: dict[str, Any]) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that keeps a program from the interpreter's frames, objects and memory."""
    current = _thread._local()

    def guard(event: str, args: tuple[Any, ...]) -> None:
        is_frame = event == "object.__getattr__" and args[1] in _FRAMES
        if not (is_frame or event in _WATCHED or event.startswith("ctypes.")):
            return
        if getattr(current, "is_asking", False):
            return
        current.is_asking = True
        try:
            caller = _getframe(1)
        finally:
            current.is_asking = False
        if caller.f_globals.get("__name__") in _INSPECTING and caller.f_back is not None:
            caller = caller.f_back
        if caller.f_builtins is program_builtins:
            raise RuntimeError(f"{event} is not available to a program")

    return guard
