"""Runs a test by statements in the program's process and counts its checks; runs beside code_process.py.

The program has a copy of the built-in names, and other copies of unittest and doctest. The test has the interpreter's
own names, modules as they were before the program ran, and comparisons that an object of the program does not decide
alone (code_rewriter.py puts them in). A check that fails is recorded, so that the program cannot swallow it.
"""

from __future__ import annotations

import _thread
import builtins
import operator
import sys
from types import CodeType, ModuleType

from code_values import FAILED, IDLE, PASSED, decode, encode

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

MAIN, MODULE = "__main__", "program"
_TOOLS = ("unittest", "doctest")
_SCALARS = frozenset({int, str, float, bool, bytes, complex, type(None)})
_COLLECTIONS = (tuple, list, set, frozenset)
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt},
    **{">=": operator.ge, "is": operator.is_, "is not": operator.is_not, "in": lambda left, right: left in right},
    "not in": lambda left, right: left not in right,
}
_COMPARING = {
    **dict.fromkeys((f"assert{kind}Equal" for kind in ("", "List", "Tuple", "Set", "Dict", "Sequence")), "=="),
    **{"assertMultiLineEqual": "==", "assertLess": "<", "assertLessEqual": "<=", "assertGreater": ">"},
    **{"assertGreaterEqual": ">=", "assertIn": "in", "assertNotIn": "not in"},
}
"""Methods of unittest, and the operation that must hold of their first two arguments."""

_FINDING = frozenset({"compile", "eval", "exec", "getattr", "globals", "locals", "vars"})

_bases = type.__dict__["__mro__"].__get__
_exc_info, _getframe = sys.exc_info, sys._getframe


class _Ended(BaseException):
    """Ends a test where it calls `sys.exit`."""

    def __init__(self, status: Any = 0) -> None:
        self.status = status


class Judge:
    """The names, modules and checks of one test; made before the program runs."""

    def __init__(self, program: ModuleType, imports: Iterable[tuple[str, Iterable[str]]]) -> None:
        self._program = program
        self._failures: list[BaseException] = []
        self._results: list[Any] = []
        self._num_checks, self._is_idle, self._is_reached = 0, False, False
        modules = _loaded(imports)
        shown = sys.modules["builtins"] = ModuleType("builtins")
        vars(shown).update(vars(builtins))
        vars(program)["__builtins__"] = shown
        tools = [name for name in sys.modules if name.partition(".")[0] in _TOOLS]
        self._tools = {name: sys.modules.pop(name) for name in tools}
        self._modules = {name: _StandIn(sys.modules[name]) for name in modules - self._tools.keys()}
        self._modules |= self._tools
        self._names = _TestNames(vars(program), vars(builtins) | self._builtins())
        if "unittest" in self._tools:
            self._count_in_unittest(self._tools["unittest"])
        if "unittest.mock" in self._tools:
            self._count_in_mocks(self._tools["unittest.mock"])
        if "doctest" in self._tools:
            self._count_in_doctest(self._tools["doctest"])
        sys.addaudithook(_guard(vars(shown)))

    def value(self, code: CodeType) -> Any:
        """Return the value of an expression; None for statements."""
        self._names.use(code)
        return eval(code, self._names)

    def verdict(self, code: CodeType, is_probe: bool) -> bytes:
        """Run a test and return its verdict; raise what it raises. A probe runs without a program."""
        if is_probe:
            self._names.anything = vars(self._program)["__getattr__"] = lambda name: _ANYTHING
            self._program.__doc__ = ">>> 1\n1\n"
        self._names["__name__"] = MAIN
        main = self._modules[MAIN] = _TestModule(self._names)
        if "sys" in self._modules:
            vars(self._modules["sys"])["modules"] = sys.modules | {MAIN: main}
        try:
            self.value(code)
        except _Ended as end:
            if end.status:
                return FAILED
        if self._failures:
            return FAILED
        if self._num_checks and not self._is_idle and all(result.testsRun for result in self._results):
            return PASSED
        return FAILED if self._is_reached and is_probe else IDLE

    def _builtins(self) -> dict[str, Any]:
        """Return the built-in names of the test that are not the interpreter's."""
        own = {"check": self._check, "count": self._count, "failed": self._failed, "compare": self._compare}
        own |= {"raised": self._raised, "caught": self._caught, "distance": self._distance, "ended": _Ended}
        own |= {"reached": self._reached, "difference": self._difference}
        return {f"__{name}__": function for name, function in own.items()} | {
            "__import__": self._import,
            "isinstance": _is_instance,
            "map": _map,
        }

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and name in self._modules:
            return self._modules[name if fromlist else name.partition(".")[0]]
        return __import__(name, globals, locals, fromlist, level)

    # what code_rewriter.py puts into a test

    def _count(self, value: Any = None) -> Any:
        self._num_checks += 1
        return value

    def _check(self, value: Any) -> bool:
        self._num_checks += 1
        return bool(value)

    def _reached(self) -> None:
        """Note that the values of the program decide whether a check runs."""
        self._is_reached = True

    def _failed(self, *message: Any) -> AssertionError:
        self._failures.append(AssertionError(*message))
        return self._failures[-1]

    def _raised(self, error: Any) -> Any:
        if isinstance(error, type) and issubclass(error, AssertionError):
            error = error()
        if isinstance(error, AssertionError):
            self._failures.append(error)
        return _Ended(error.code) if isinstance(error, SystemExit) else error

    def _caught(self, error: BaseException | None = None) -> None:
        """Forget a failure that the test itself has caught."""
        error = error or _exc_info()[1]
        self._failures = [failure for failure in self._failures if failure is not error]

    def _compare(self, operations: Iterable[str], is_condition: bool, left: Any, *others: Any) -> Any:
        """Return the value of a chain of comparisons."""
        result: Any = True
        for operation, right in zip(operations, others, strict=True):
            result = self._compared(operation, is_condition, left, right)
            if not result:
                return result
            left = right
        return result

    def _compared(self, name: str, is_condition: bool, left: Any, right: Any) -> Any:
        operation = _OPERATIONS[name]
        result = operation(left, right)
        if name in ("is", "is not") or left is right or (type(left) in _SCALARS and type(right) in _SCALARS):
            return result
        if not is_condition and type(result) is not bool:
            return result
        if name in ("!=", "not in"):
            return not self._compared({"!=": "==", "not in": "in"}[name], True, left, right)
        if name == "in" and _is_strange(right):
            return bool(result) and not _is_true(operation, object(), right)
        (has_own_left, strange_left), (has_own_right, strange_right) = self._parts(left), self._parts(right)
        if has_own_left or has_own_right:
            return bool(result)
        if strange_left and strange_right:
            probed = operator.eq if name == "in" else operation
            return bool(result) and not any(
                _is_true(probed, part, object()) for part in (*strange_left, *strange_right)
            )
        if name in ("==", "in") and not result:
            return False
        try:
            return bool(operation(_plain(left), _plain(right)))
        except (ValueError, RecursionError):  # too many parts, or nested too deeply
            return bool(result)

    def _parts(self, value: Any) -> tuple[bool, list[Any]]:
        """Return whether a value has objects of the test, and its parts that are not plain data."""
        try:
            parts = list(self._leaves(value))
        except RecursionError:
            return False, [value]
        has_own = any(self._is_own(type(part)) for part in parts)
        return has_own, [part for part in parts if _is_strange(part)]

    def _leaves(self, value: Any) -> Iterator[Any]:
        kind = type(value)
        if kind in _SCALARS:
            return
        bases = () if self._is_own(kind) else _bases(kind)
        for base in _COLLECTIONS:
            if base in bases:
                for part in base.__iter__(value):
                    yield from self._leaves(part)
                return
        if dict in bases:
            for key in dict.__iter__(value):
                yield from self._leaves(key)
                yield from self._leaves(dict.__getitem__(value, key))
            return
        yield value

    def _is_own(self, kind: type) -> bool:
        """Return whether the test or a module of its own says what equals objects of this type."""
        method = next((vars(base)["__eq__"] for base in _bases(kind) if "__eq__" in vars(base)), None)
        names = getattr(method, "__globals__", None) if type(method) is type(_map) else None
        return names is self._names or any(names is vars(module) for module in self._tools.values())

    def _distance(self, function: Any, left: Any, right: Any) -> Any:
        """Return `abs(left - right)`, of the plain data if one of the two is a number."""
        if type(left) in _SCALARS or type(right) in _SCALARS:
            left, right = _plain(left), _plain(right)
        return function(left - right)

    def _difference(self, left: Any, right: Any) -> Any:
        """Return `left - right`, where an object of the program does not say how far it is from a number."""
        result = left - right
        if (type(left) in _SCALARS) == (type(right) in _SCALARS) or _is_strange(result):
            return result
        plain = _plain(left) - _plain(right)
        return result if _plain(result) == plain else plain

    # what counts in the standard library's tools

    def _count_in_unittest(self, unittest: Any) -> None:
        for name, method in list(vars(unittest.TestCase).items()):
            if name.startswith(("assert", "fail")) and callable(method) and name != "failureException":
                setattr(unittest.TestCase, name, self._checking(name, method))
        result, init, judge = unittest.TestResult, unittest.TestResult.__init__, self

        def start(self: Any, *args: Any, **settings: Any) -> None:
            init(self, *args, **settings)
            self.checks_before = judge._num_checks
            judge._results.append(self)

        def was_successful(self: Any, original: Any = result.wasSuccessful) -> bool:
            judge._is_idle |= judge._num_checks == self.checks_before
            return original(self)

        def failing(method: Any) -> Any:
            def add(self: Any, test: Any, *errors: Any) -> None:
                if errors and errors[-1] is None:  # of a part of a test
                    return method(self, test, *errors)
                judge._failed()
                return method(self, test, *errors)

            return add

        def expected(self: Any, test: Any, error: Any, original: Any = result.addExpectedFailure) -> None:
            judge._caught(error[1])
            original(self, test, error)

        result.__init__, result.wasSuccessful, result.addExpectedFailure = start, was_successful, expected
        for name in ("addError", "addFailure", "addSubTest", "addUnexpectedSuccess"):
            setattr(result, name, failing(getattr(result, name)))

        class Main(unittest.TestProgram):
            def __init__(self, module: Any = MAIN, *args: Any, **settings: Any) -> None:
                module = judge._modules.get(module, module) if isinstance(module, str) else module
                super().__init__(module, *args, **settings | {"exit": False})

        unittest.main = Main

    def _checking(self, name: str, method: Any) -> Any:
        def check(case: Any, *args: Any, **settings: Any) -> Any:
            self._num_checks += 1
            if name == "assertCountEqual":
                args = (list(args[0]), list(args[1]), *args[2:])
            try:
                result = method(case, *args, **settings)
                if len(args) > 1 and name in _COMPARING and not self._compared(_COMPARING[name], True, *args[:2]):
                    raise case.failureException(f"{name}: an object of the program is not plain data")
                if len(args) > 1 and name in ("assertAlmostEqual", "assertCountEqual"):
                    parts = [self._parts(arg)[1] for arg in args[:2]]
                    if any(parts) != all(parts):
                        raise case.failureException(f"{name}: an object of the program is not plain data")
                    if not any(parts):
                        method(case, *map(_plain, args[:2]), *args[2:], **settings)
                return result
            except AssertionError as error:
                self._raised(error)
                raise

        return check

    def _count_in_mocks(self, mock: Any) -> None:
        for owner in (mock.NonCallableMock, mock.AsyncMockMixin):
            for name, method in list(vars(owner).items()):
                if name.startswith("assert_"):
                    setattr(owner, name, self._checking(name, method))

    def _count_in_doctest(self, doctest: Any) -> None:
        run, testmod = doctest.DocTestRunner.run, doctest.testmod

        def counted_run(runner: Any, *args: Any, **settings: Any) -> Any:
            results = run(runner, *args, **settings)
            self._num_checks += results.attempted
            if results.failed:
                self._failed()
            return results

        def counted_testmod(m: Any = None, *args: Any, **settings: Any) -> Any:
            before = self._num_checks
            results = testmod(self._documented() if m is None else m, *args, **settings)
            self._is_idle |= self._num_checks == before
            return results

        doctest.DocTestRunner.run, doctest.testmod = counted_run, counted_testmod

    def _documented(self) -> ModuleType:
        """Return a module with the names and docstrings of the program and the test."""
        module = ModuleType(MAIN)
        module.__doc__ = self._names.get("__doc__")
        if self._names.anything is not None:
            return module
        names = vars(self._program) | self._names
        own = {name: value for name, value in names.items() if getattr(value, "__module__", "") in (MAIN, MODULE)}
        documented = {
            name: value for name, value in own.items() if isinstance(value, type) or hasattr(value, "__code__")
        }
        vars(module).update(names, __test__={**documented, MODULE: self._program.__doc__ or ""})
        return module


class _TestNames(dict):
    """Global names of a test; a name that it does not define is the program's."""

    def __init__(self, program: dict[str, Any], own_builtins: dict[str, Any]) -> None:
        super().__init__(__name__=MODULE, __builtins__=own_builtins)
        self._program = program
        self._hidden: set[str] = set()
        self.anything: Callable[[str], Any] | None = None

    def use(self, code: CodeType) -> None:
        """Prepare for statements or an expression.

        The name of a built-in function keeps its meaning, unless it is the only name of the program that they use, and
        not a function that could find others.
        """
        used = _names(code) & {name for name in self._program if type(name) is str and not name.startswith("__")}
        shared = {name for name in used if hasattr(builtins, name)}
        self._hidden = set() if used == shared - _FINDING and len(shared) == 1 else shared
        for name in used - self._hidden:
            if callable(self._program[name]):
                self.setdefault(name, self._program[name])  # bodies of classes find only names that the dict has

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._hidden or self._program.get(name) is not value:  # `from program import *`
            super().__setitem__(name, value)

    def __missing__(self, name: str) -> Any:
        if name in self._hidden or name.startswith("__"):
            raise KeyError(name)
        if self.anything is not None and not hasattr(builtins, name):
            return self.anything(name)
        return self._program[name]


def _names(code: CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


class _TestModule(ModuleType):
    """The module `__main__` during a test, in which unittest finds its classes."""

    def __init__(self, names: _TestNames) -> None:
        super().__init__(MAIN)
        vars(self)["_names"] = names

    def __dir__(self) -> list[str]:
        names = self._names
        return [name for name, value in names.items() if names._program.get(name, names) is not value]

    def __getattr__(self, name: str) -> Any:
        try:
            return self._names[name]
        except KeyError:
            raise AttributeError(name) from None


class _StandIn(ModuleType):
    """A module whose functions and numbers are those before the program ran; what the test sets, the program sees."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        saved = {name: value for name, value in vars(module).items() if callable(value) or type(value) in _SCALARS}
        if module.__name__ == "builtins":
            saved["isinstance"] = _is_instance
        vars(self).update({name: value for name, value in saved.items() if value is not None}, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)
        vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)
        vars(self).pop(name, None)


def _loaded(imports: Iterable[tuple[str, Iterable[str]]]) -> set[str]:
    """Import what a test imports, and return the names of the modules; what is missing is missed when the test runs."""
    modules = set()
    for name, attributes in imports:
        try:
            __import__(name)
            for attribute in attributes:
                if not hasattr(sys.modules[name], attribute):
                    __import__(f"{name}.{attribute}")
        except Exception:
            if name not in sys.modules:
                continue
        while name:
            modules.add(name)
            name = name.rpartition(".")[0]
    return modules


def _plain(value: Any) -> Any:
    return decode(encode(value), sys.maxsize)


def _is_strange(value: Any) -> bool:
    """Return whether a value is not plain data."""
    try:
        return encode(value).startswith(b"O")
    except Exception:
        return True


def _is_true(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> bool:
    try:
        return bool(operation(left, right))
    except Exception:
        return False


def _is_instance(value: Any, kinds: Any) -> bool:
    """Return what `isinstance` does, except that a value cannot pretend to be of a built-in type."""
    if value is _ANYTHING:
        return True
    if type(kinds) is tuple:
        return any(_is_instance(value, kind) for kind in kinds)
    is_builtin = type(kinds) is type and not kinds.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    return isinstance(value, kinds) and (not is_builtin or kinds in _bases(type(value)))


def _map(function: Any, *iterables: Any) -> Iterator[Any]:
    """Yield what `map` does, but do not take an error of the function for the end."""
    for each in zip(*iterables, strict=False):
        yield function(*each)


_WATCHED = frozenset(
    "sys._getframe sys.settrace sys.setprofile sys._current_frames sys._current_exceptions sys.addaudithook "
    "sys.monitoring.register_callback gc.get_objects gc.get_referrers gc.get_referents".split()
)
_FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
_INSPECTING = frozenset({"inspect", "traceback", "logging", "asyncio.base_tasks", "bdb", "pdb", "trace", "ctypes"})


def _guard(program_builtins: dict[str, Any]) -> Callable[[str, tuple[Any, ...]], None]:
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


class _Anything:
    """Stands for whatever a program could define."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self) -> Iterator[_Anything]:
        return iter((self,))

    async def __aiter__(self) -> Any:
        yield self

    def __await__(self) -> Any:
        return self
        yield

    async def __aenter__(self) -> _Anything:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def __hash__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0


_ANYTHING = _Anything()
for (
    _name
) in "call getitem enter eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul neg pos abs round".split():
    setattr(_Anything, f"__{_name}__", lambda self, *args, **settings: self)
for _name in "radd rsub rmul rtruediv rfloordiv rmod rpow and or xor setitem delitem".split():
    setattr(_Anything, f"__{_name}__", lambda self, *args: self)
for _name in ("len", "index", "int"):
    setattr(_Anything, f"__{_name}__", lambda self: 1)
_Anything.__contains__ = lambda self, value: True
