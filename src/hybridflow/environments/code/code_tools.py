"""Counts what unittest, its mocks and doctest check in a test by statements; runs beside code_process.py."""

from __future__ import annotations

from types import ModuleType

from code_names import MAIN, MODULE

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from code_judge import Judge

_EQUAL = ("", "List", "Tuple", "Set", "Dict", "Sequence", "MultiLine")
_OTHERS = {"Less": "Lt", "LessEqual": "LtE", "Greater": "Gt", "GreaterEqual": "GtE", "In": "In", "NotIn": "NotIn"}
_COMPARING = {f"assert{kind}Equal": "Eq" for kind in _EQUAL} | {f"assert{kind}": name for kind, name in _OTHERS.items()}
"""Methods of unittest, and the operation that must hold of their first two arguments."""


def count_in(tools: dict[str, Any], judge: Judge) -> None:
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
