"""Checks of a test's statements before a program runs: they must compile, and something in them must check."""

import ast
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from hybridflow.environments.code.code_rewriter import is_check
from hybridflow.errors import RewardError

_warnings_lock = threading.Lock()

_IDLE_DECORATORS = ("classmethod", "dataclass", "fixture", "parametrize", "property", "skip", "staticmethod")
_FINDING = {
    *("main", "discover", "loadTestsFromModule", "loadTestsFromName", "loadTestsFromNames"),
    *("globals", "locals", "vars", "eval", "exec", "modules"),
}
"""Names by which a test finds its functions and classes without their names."""

_RUNNING = ("main", "run", "debug", "TestResult")


def parsed(statements: str) -> ast.Module:
    """Return the statements; raise RewardError if they do not compile."""
    try:
        compiled(statements.encode(), "exec")
        return compiled(statements.encode(), "exec", ast.PyCF_ONLY_AST)
    except SyntaxError as error:
        line = f"line {error.lineno}, {(error.text or '').strip()!r:.200}: " if error.lineno else ""
        raise RewardError(f"the statements of a test do not compile: {line}{error.msg}; correct the test.") from None
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise too_long(statements, f"{type(error).__name__} {error}") from None


def compiled(source: bytes | ast.Module | ast.Expression, mode: str, flags: int = 0) -> Any:
    """Return the code of statements or of an expression."""
    if isinstance(source, ast.AST):
        ast.fix_missing_locations(source)
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as a SyntaxWarning for an escape
        return compile(source, "test.py", mode, flags, dont_inherit=True, optimize=0)


def too_long(statements: str, problem: str = "RecursionError") -> RewardError:
    """Return the error of a test that is too deeply nested, or that cannot be read."""
    return RewardError(
        f"the statements of a test do not compile: {problem} in {statements!r:.200}; correct the test, or make it "
        "shorter."
    )


def require_check(test: ast.Module, statements: str) -> None:
    """Raise RewardError for a rewritten test without a check that something calls."""
    if not _checks(test, {_name(each) or "" for each in ast.walk(test)}):
        raise idle_error(statements, "runs nothing that could fail")


def idle_error(statements: str, why: str) -> RewardError:
    """Return the error of a test that checks nothing."""
    fix = _fix(parsed(statements).body)
    return RewardError(f"a test checks nothing, so every program would pass it: {statements!r:.200} {why}. {fix}")


def _checks(node: ast.AST, used: set[str]) -> bool:
    """Return whether a part of a test has a check, outside of `if False:` and of what is defined, but never used."""
    inner = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and isinstance(node.test, ast.Constant):
        inner = node.body if node.test.value else node.orelse
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        methods = [each for each in node.body if isinstance(node, ast.ClassDef) and hasattr(each, "decorator_list")]
        names = {node.name, *_FINDING}
        if any(ast.unparse(base).endswith("TestCase") for base in getattr(node, "bases", ())):
            names = {*_FINDING, *_RUNNING, *(getattr(each, "name", "") for each in methods)}
        functions = [getattr(each, "func", each) for each in node.decorator_list]
        is_called = any(_name(each) not in _IDLE_DECORATORS for each in functions)
        if used.isdisjoint(names) and not is_called:
            inner = [each for each in node.body if isinstance(node, ast.ClassDef) and each not in methods]
        elif methods:
            used = used | {"main"}  # so that its methods are
    return is_check(node) or any(_checks(each, used) for each in inner)


def _name(node: ast.AST) -> str | None:
    return getattr(node, "attr", getattr(node, "id", None))


def _fix(body: Sequence[ast.stmt]) -> str:
    """Return what to add, for the last class or function of the test."""
    for statement in reversed(body):
        if isinstance(statement, ast.ClassDef):
            return f"Run the tests of {statement.name}: `unittest.main()`."
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = "the function to test" if statement.args.args else ""
            return f"Call it: `{statement.name}({arguments})`."
    return "Add an assertion, as in `assert add(1, 2) == 3`."
