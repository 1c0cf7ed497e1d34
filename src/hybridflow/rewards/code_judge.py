"""The two processes of a test by statements: the program's, which serves it, and the judge's, which runs the test.

Both are restricted, and the program has no way into the judge's process: it gets calls and returns values.
"""

from __future__ import annotations

import builtins
import os
import sys
from types import CodeType, ModuleType

from code_objects import origin_of  # beside this file
from code_peer import Peer

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_NAMESPACE = "program"
_STREAMS = ((sys, "stdin"), (sys, "stdout"), (sys, "stderr"), (builtins, "input"), (builtins, "print"))
"""What statements replace to give the program input or to see its output."""


def namespace_of(module: str) -> dict[str, Any]:
    """Create a module of this name, which dataclasses and pickle look up, and return its namespace."""
    sys.modules[module] = ModuleType(module)
    return sys.modules[module].__dict__


def serve_program(code: CodeType, connection: int, loaded: Callable[[], None]) -> None:
    """Run the program, then do with its objects what the judge asks for; never returns."""
    peer, namespace = Peer(connection, trusts=True, end=lambda: os._exit(1)), namespace_of(_NAMESPACE)
    originals = {number: getattr(*place) for number, place in enumerate(_STREAMS)}

    def replace(number: int, is_original: bool, value: Any) -> None:
        setattr(*_STREAMS[number], originals[number] if is_original else value)

    def is_module(name: str) -> bool:
        return isinstance(namespace[name], ModuleType) and namespace[name].__name__ == name

    peer.operations |= {"global": namespace.__getitem__, "replace": replace, "is_module": is_module}
    peer.operations["seed"] = lambda args, kwargs: __import__("random").seed(*args, **dict(kwargs))
    peer.operations["names"] = lambda: tuple(name for name in namespace if type(name) is str)
    sys.setrecursionlimit(sys.getrecursionlimit() + 10)  # for the frames of the functions that have called this one
    exec(code, namespace)
    loaded()
    peer.serve_forever()


class _Judge(Peer):
    """The judge's end: brings streams that the statements have replaced to the program before it runs."""

    def __init__(self, connection: int, end: Callable[[], NoReturn]) -> None:
        super().__init__(connection, trusts=False, end=end)
        self._originals = [getattr(*place) for place in _STREAMS]
        self._current = list(self._originals)

    def ask(self, operation: str, *operands: Any) -> Any:
        for number, place in enumerate(_STREAMS):
            value = getattr(*place)
            if value is not self._current[number]:
                self._current[number] = value
                is_original = value is self._originals[number]
                super().ask("replace", number, is_original, None if is_original else value)
        return super().ask(operation, *operands)


class _Super:
    """The `super()` of a class of the statements that derives from a class of the program."""

    def __init__(self, peer: Peer, kind: type, instance: Any) -> None:
        object.__setattr__(self, "of", (peer, kind, instance))

    def __getattribute__(self, name: str) -> Any:
        peer, kind, instance = object.__getattribute__(self, "of")
        return peer.ask("super", kind, instance, name)


def _super(*args: Any) -> Any:
    if not args:
        frame = sys._getframe(1)
        args = frame.f_locals["__class__"], frame.f_locals[frame.f_code.co_varnames[0]]
    origin = origin_of(args[0])
    return super(*args) if origin is None else _Super(origin[0], *args)  # pyright: ignore[reportArgumentType]


class _Namespace(dict):
    """Global names of the statements; a name that they do not define is the program's."""

    def __init__(self, judge: _Judge, names: frozenset[str]) -> None:
        super().__init__(__name__=_NAMESPACE)
        self._judge, self._names = judge, names

    def __missing__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        value = self._judge.ask("global", name)
        if origin_of(value) is not None:  # numbers and texts may change, functions and classes are looked up once
            self[name] = value
        return value

    def attribute(self, name: str) -> Any:
        """Return a name's value for `import program`."""
        if name in self or name in self._names:
            return self[name]
        raise AttributeError(f"the program does not define {name!r}")


def run_statements(statements: bytes, connection: int, end: Callable[[], NoReturn]) -> None:
    """Run the statements of a test with the names of the program; raise what they raise."""
    code = compile(statements, "test.py", "exec", dont_inherit=True)
    judge = _Judge(connection, end)
    used = _names(code)
    modules, names = _split(judge, used, statements)
    namespace = _Namespace(judge, names)
    namespace.update({name: __import__(name) for name in modules})
    for name in sorted(used & names):
        namespace[name]  # bodies of classes find only names that the dict has
    if "super" in used:
        namespace["super"] = _super
    if b"seed(" in statements:
        _share_seed(judge)
    module = ModuleType(_NAMESPACE)
    module.__getattr__ = namespace.attribute
    sys.modules[_NAMESPACE] = module
    exec(code, namespace)


def _split(judge: Peer, used: set[str], statements: bytes) -> tuple[set[str], frozenset[str]]:
    """Return the modules to import, of the names that the test uses, and the names that mean the program's objects.

    A built-in function, and a name with a dot that is a module of the standard library, keeps its meaning, so that the
    program cannot replace `abs` in `assert abs(f(2) - 1.4) < 0.1`. The exception is a test that uses one such name and
    no other name of the program: it tests this function.
    """
    defined = {name for name in judge.ask("names") if type(name) is str and not name.startswith("__")}
    used = used & defined
    of_library = used & sys.stdlib_module_names
    modules = {name for name in of_library if judge.ask("is_module", name) is True}
    shared = {name for name in used if hasattr(builtins, name)} | modules
    shared |= {name for name in of_library if name.encode() + b"." in statements}
    is_tested = used == shared and len(shared - modules) == 1
    return modules, frozenset(defined - modules if is_tested else defined - shared)


def _share_seed(judge: Peer) -> None:
    """Have `random.seed` seed the program's generator too."""
    import random

    seed_here = random.seed

    def seed(*args: Any, **kwargs: Any) -> None:
        seed_here(*args, **kwargs)
        judge.ask("seed", args, tuple(kwargs.items()))

    random.seed = seed


def _names(code: CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)
