"""Runs a test by statements in the program's process and counts its checks; runs beside code_process.py.

The program has a copy of the built-in names, and other copies of unittest and doctest. The test has the interpreter's
own names, modules as they were before the program ran, and comparisons that an object of the program does not decide
alone (code_rewriter.py puts them in). A check that fails is recorded, so that the program cannot swallow it.
"""

from __future__ import annotations

import builtins
import operator
import sys
from types import CodeType, FunctionType, ModuleType

from code_names import MAIN, MODULE, SCALARS, TOOLS, StandIn, TestModule, TestNames, bases_of, guard_of, load
from code_values import FAILED, IDLE, PASSED, described, encode, is_opaque, value_of

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Is": operator.is_,
    "IsNot": operator.is_not,
    "In": lambda left, right: left in right,
    "NotIn": lambda left, right: left not in right,
}
"""Comparisons by their names in `ast`."""

_OPPOSITES = {"NotEq": "Eq", "NotIn": "In"}
_EQUAL = ("", "List", "Tuple", "Set", "Dict", "Sequence", "MultiLine")
_OTHERS = {"Less": "Lt", "LessEqual": "LtE", "Greater": "Gt", "GreaterEqual": "GtE", "In": "In", "NotIn": "NotIn"}
_COMPARING = {f"assert{kind}Equal": "Eq" for kind in _EQUAL} | {f"assert{kind}": name for kind, name in _OTHERS.items()}
"""Methods of unittest, and the operation that must hold of their first two arguments."""

_exc_info = sys.exc_info


class _Ended(BaseException):
    """Ends a test where it calls `sys.exit`."""

    def __init__(self, status: Any = 0) -> None:
        self.status = status


class Judge:
    """The names, modules and checks of one test; made before the program runs."""

    def __init__(
        self, program: ModuleType, imports: Iterable[tuple[str, Iterable[str]]], send: Callable[[bytes], None]
    ) -> None:
        self._send_message = send
        self.results: list[Any] = []
        self.reads_program = False  # whether a test looks for checks in the program's docstrings
        self._num_checks = 0
        self._failures: list[BaseException] = []
        load(imports)
        shown = sys.modules["builtins"] = ModuleType("builtins")
        vars(shown).update(vars(builtins))
        vars(program)["__builtins__"] = shown
        tools = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in TOOLS}
        self._tools = [vars(module) for module in tools.values()]
        self.modules = {name: StandIn(module) for name, module in sys.modules.items()} | tools
        own = (self.count, self.failed, self.raised, self.caught, self._check, self._compare, self._send)
        functions = {function.__name__.strip("_"): function for function in (*own, self._distance, self._difference)}
        names = {f"__{name}__": function for name, function in functions.items()}
        self.names = TestNames(vars(program), {**names, "__ended__": _Ended, "__import__": self._import})
        _count_in(tools, self)
        sys.addaudithook(guard_of(vars(shown)))

    def verdict(self, code: CodeType) -> bytes:
        """Run a test and return its verdict; raise what it raises."""
        self.names["__name__"] = MAIN
        self.modules[MAIN] = TestModule(self.names)
        vars(self.modules["sys"])["modules"] = sys.modules | {MAIN: self.modules[MAIN]}
        self.names.use(code)
        try:
            exec(code, self.names)
        except _Ended as end:
            if end.status:
                return FAILED
        if self._failures or not all(result.wasSuccessful() for result in self.results):
            return FAILED
        if any(result.testsRun <= len(result.skipped) for result in self.results):
            return IDLE
        return PASSED if self._num_checks else FAILED if self.reads_program else IDLE

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and name in self.modules:
            return self.modules[name if fromlist else name.partition(".")[0]]
        return __import__(name, globals, locals, fromlist, level)

    def count(self) -> None:
        """Count a check that runs."""
        self._num_checks += 1

    def failed(self, *message: Any) -> AssertionError:
        """Record a failed check, and return the error to raise."""
        return self.raised(AssertionError(*message))

    def raised(self, error: Any) -> Any:
        """Record an error that the test raises, if it is a failed check, and return what to raise."""
        if isinstance(error, type) and issubclass(error, AssertionError):
            error = error()
        if isinstance(error, AssertionError):
            self._failures.append(error)
        return _Ended(error.code) if isinstance(error, SystemExit) else error

    def caught(self, error: BaseException | None = None) -> None:
        """Forget a failed check, whose error the test itself has caught."""
        error = error or _exc_info()[1]
        self._failures = [failure for failure in self._failures if failure is not error]

    def _send(self, value: Any, is_iterated: bool) -> None:
        """Send a value, or its elements if it is not plain data, to be checked by the scorer."""
        self.count()
        self._send_message(encode(tuple(value) if is_iterated and _is_strange(value) else value))

    def _check(self, value: Any) -> bool:
        self.count()
        return bool(value)

    def _compare(self, operations: Iterable[str], is_condition: bool, left: Any, *others: Any) -> Any:
        result: Any = True
        for operation, right in zip(operations, others, strict=True):
            result = self.compared(operation, is_condition, left, right)
            if not result:
                break
            left = right
        return result

    def compared(self, name: str, is_condition: bool, left: Any, right: Any) -> Any:
        """Return the value of a comparison, which must hold of the plain data if one side has only such.

        Objects must not claim to equal an object that they do not know. In another place than a condition a
        comparison may have another value than True or False.
        """
        operation = _OPERATIONS[name]
        result = operation(left, right)
        if name in ("Is", "IsNot") or left is right or (type(left) in SCALARS and type(right) in SCALARS):
            return result
        if not is_condition and type(result) is not bool:
            return result
        if name in _OPPOSITES:
            return not self.compared(_OPPOSITES[name], True, left, right)
        if name == "In" and _is_strange(right):
            return bool(result) and not _is_true(operation, object(), right)
        strange = self._strange(left), self._strange(right)
        if None in strange or (name in ("Eq", "In") and not result):
            return bool(result)
        if all(strange):
            claims = operator.eq if name == "In" else operation
            return bool(result) and not any(
                _is_true(claims, part, object()) for parts in strange for part in parts or ()
            )
        try:
            return bool(operation(_plain(left), _plain(right)))
        except (ValueError, RecursionError):  # too many parts, or nested too deeply
            return bool(result)

    def both_plain(self, left: Any, right: Any) -> tuple[Any, Any]:
        """Return the plain data of two values, or the values if neither is plain; raise AssertionError if one is."""
        strange = bool(self._strange(left)), bool(self._strange(right))
        if any(strange) != all(strange):
            raise AssertionError("an object of the program is not plain data")
        return (left, right) if any(strange) else (_plain(left), _plain(right))

    def _strange(self, value: Any) -> list[Any] | None:
        """Return the parts of a value that are not plain data; None if there are objects of the test among them."""
        parts: list[Any] = []
        try:
            described(value, parts, self._is_own)
        except Exception:
            return [value]
        return None if any(self._is_own(type(part)) for part in parts) else parts

    def _is_own(self, kind: type) -> bool:
        """Return whether the test or a module of its own says what equals objects of this type."""
        method = next((vars(base)["__eq__"] for base in bases_of(kind) if "__eq__" in vars(base)), None)
        names = method.__globals__ if isinstance(method, FunctionType) else None
        return names is self.names or any(names is each for each in self._tools)

    def _distance(self, function: Any, left: Any, right: Any) -> Any:
        """Return `abs(left - right)`, of the plain data if one of the two is a number."""
        if type(left) in SCALARS or type(right) in SCALARS:
            left, right = _plain(left), _plain(right)
        return function(left - right)

    def _difference(self, left: Any, right: Any) -> Any:
        """Return `left - right`, where an object of the program does not say how far it is from a number."""
        result = left - right
        if (type(left) in SCALARS) == (type(right) in SCALARS) or _is_strange(result):
            return result
        plain = _plain(left) - _plain(right)
        return result if _plain(result) == plain else plain


def _plain(value: Any) -> Any:
    return value_of(described(value), sys.maxsize)


def _is_strange(value: Any) -> bool:
    """Return whether a value is not plain data."""
    try:
        return is_opaque(described(value))
    except Exception:
        return True


def _is_true(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> bool:
    try:
        return bool(operation(left, right))
    except Exception:
        return False


def _count_in(tools: dict[str, Any], judge: Judge) -> None:
    """Have the modules of a test tell its judge of their checks and failures."""
    if "unittest" in tools:
        _count_in_unittest(tools["unittest"], judge)
        tools["unittest.suite"].sys = judge.modules["sys"]  # in whose __main__ it finds setUpModule
    if "unittest.mock" in tools:
        for owner in (tools["unittest.mock"].NonCallableMock, tools["unittest.mock"].AsyncMockMixin):
            _count_methods(owner, ("assert_",), judge)
    if "doctest" in tools:
        _count_in_doctest(tools["doctest"], judge)


def _count_methods(owner: Any, prefixes: tuple[str, ...], judge: Judge) -> None:
    for name, method in list(vars(owner).items()):
        if name.startswith(prefixes) and name != "failureException":
            setattr(owner, name, _checking(name, method, judge))


def _checking(name: str, method: Any, judge: Judge) -> Any:
    def check(case: Any, *args: Any, **settings: Any) -> Any:
        judge.count()
        try:
            if name == "assertCountEqual":
                args = (list(args[0]), list(args[1]), *args[2:])
            if name in ("assertAlmostEqual", "assertCountEqual"):
                args = (*judge.both_plain(*args[:2]), *args[2:])
            result = method(case, *args, **settings)
            if name in _COMPARING and not judge.compared(_COMPARING[name], True, *args[:2]):
                raise AssertionError(f"{name}: an object of the program is not plain data")
            return result
        except AssertionError as error:
            judge.raised(error)
            raise

    return check


def _count_in_unittest(unittest: Any, judge: Judge) -> None:
    _count_methods(unittest.TestCase, ("assert", "fail"), judge)
    result, init, expect = unittest.TestResult, unittest.TestResult.__init__, unittest.TestResult.addExpectedFailure

    def start(self: Any, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        judge.results.append(self)

    def expected(self: Any, test: Any, error: Any) -> None:
        judge.caught(error[1])
        expect(self, test, error)

    result.__init__, result.addExpectedFailure = start, expected

    class Main(unittest.TestProgram):
        def __init__(self, module: Any = MAIN, *args: Any, **settings: Any) -> None:
            super().__init__(judge.modules.get(module, module), *args, **settings | {"exit": False})

    unittest.main = Main


def _count_in_doctest(doctest: Any, judge: Judge) -> None:
    run, testmod = doctest.DocTestRunner.run, doctest.testmod

    def counted_run(runner: Any, *args: Any, **settings: Any) -> Any:
        results = run(runner, *args, **settings)
        for _ in range(results.attempted):
            judge.count()
        if results.failed:
            judge.failed()
        return results

    def counted_testmod(m: Any = None, *args: Any, **settings: Any) -> Any:
        judge.reads_program = True
        return testmod(_documented(judge) if m is None else m, *args, **settings)

    doctest.DocTestRunner.run, doctest.testmod = counted_run, counted_testmod


def _documented(judge: Judge) -> ModuleType:
    """Return a module with the names and docstrings of the program and the test."""
    module, names = ModuleType(MAIN), judge.names.program | judge.names
    own = {name: value for name, value in names.items() if getattr(value, "__module__", "") in (MAIN, MODULE)}
    tests = {name: value for name, value in own.items() if isinstance(value, type) or hasattr(value, "__code__")}
    program = judge.names.program.get("__doc__") or ""
    vars(module).update(names, __doc__=judge.names.get("__doc__"), __test__={**tests, MODULE: program})
    return module
