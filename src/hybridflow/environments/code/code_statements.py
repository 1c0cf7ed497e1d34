"""Checks of a test's statements before a program runs: they must compile, and something in them must check."""

import ast
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from hybridflow.environments.code.code_rewriter import constants_of, is_check
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
    if not any(is_check(node) for node in _reached(test)):
        raise idle_error(statements, "runs nothing that could fail")


def idle_error(statements: str, why: str) -> RewardError:
    """Return the error of a test that checks nothing."""
    fix = _fix(parsed(statements).body)
    return RewardError(f"a test checks nothing, so every program would pass it: {statements!r:.200} {why}. {fix}")


def _reached(test: ast.Module) -> Iterator[ast.AST]:
    """Yield the parts of a test that may run: not functions that nothing names, nor branches that are never taken."""
    constants = constants_of(test)
    used = {getattr(each, "attr", getattr(each, "id", None)) for each in ast.walk(test)}
    waiting: dict[str, list[ast.AST]] = {}
    named: set[str] = set()
    todo: list[ast.AST] = [test]
    while todo:
        node = todo.pop()
        yield node
        match node:
            case ast.If(test=ast.Constant() | ast.Name() | ast.Compare() as condition, body=body, orelse=orelse):
                value = _constant(condition, constants)
                todo += [condition, *([] if value is False else body), *([] if value else orelse)]
                continue
            case ast.For(iter=ast.Tuple(elts=[]) | ast.List(elts=[]), orelse=orelse):
                todo += orelse
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if isinstance(node, ast.ClassDef):
                    todo += [each for each in node.body if each not in _methods(node)]
                if _is_unittest(node) and used.isdisjoint((*_RUNNING, *(each.name for each in _methods(node)))):
                    continue
                if named.isdisjoint({node.name, *_FINDING}) and _are_idle(node.decorator_list):
                    waiting.setdefault(node.name, []).append(node)
                    continue
            case ast.Name(id=name) | ast.Attribute(attr=name):
                named.add(name)
                todo += waiting.pop(name, ())
                if name in _FINDING:
                    todo += [each for nodes in waiting.values() for each in nodes]
                    waiting.clear()
        named |= {each.name for each in _methods(node)}
        todo += ast.iter_child_nodes(node)


def _is_unittest(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("TestCase") for base in node.bases)


def _methods(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _constant(condition: ast.expr, constants: dict[str, object]) -> bool | None:
    """Return the truth of a condition that is a constant; None if it is not."""
    if isinstance(condition, ast.Name) and condition.id in constants:
        return bool(constants[condition.id])
    if ast.unparse(condition) in ("__name__ == '__main__'", "'__main__' == __name__"):
        return True
    return bool(condition.value) if isinstance(condition, ast.Constant) else None


def _are_idle(decorators: Sequence[ast.expr]) -> bool:
    """Return whether all decorators are known not to call what they decorate."""
    functions = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in decorators]
    names = [getattr(function, "attr", getattr(function, "id", None)) for function in functions]
    return all(name in _IDLE_DECORATORS for name in names)


def _fix(body: Sequence[ast.stmt]) -> str:
    """Return what to add, for the last class or function of the test."""
    for statement in reversed(body):
        if isinstance(statement, ast.ClassDef):
            return f"Run the tests of {statement.name}: `unittest.main()`."
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = "the function to test" if statement.args.args else ""
            return f"Call it: `{statement.name}({arguments})`."
    return "Add an assertion, as in `assert add(1, 2) == 3`."
