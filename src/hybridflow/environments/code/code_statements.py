"""Checks of a test's statements before a program runs: they must compile, and something in them must run."""

import ast
import threading
import warnings
from collections.abc import Sequence

from hybridflow.errors import RewardError

_warnings_lock = threading.Lock()

_CONSTANT_PARTS = (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp)
_IDLE_DECORATORS = ("classmethod", "dataclass", "fixture", "parametrize", "property", "staticmethod")


def parsed(statements: str) -> ast.Module:
    """Return the statements; raise RewardError if they do not compile, or if every program passes them.

    The latter only import, define functions and classes, and assign constants: nothing calls the program.
    """
    module = _compiled(statements)
    if all(map(_is_idle, module.body)):
        raise idle_error(statements, "only imports, defines or assigns constants")
    return module


def idle_error(statements: str, why: str) -> RewardError:
    """Return the error of a test that checks nothing."""
    fix = _fix(_compiled(statements).body)
    return RewardError(f"a test checks nothing, so every program would pass it: {statements!r:.200} {why}. {fix}")


def _compiled(statements: str) -> ast.Module:
    try:
        with _warnings_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as a SyntaxWarning for an escape
            source = statements.encode()
            compile(source, "test.py", "exec", dont_inherit=True)
            return ast.parse(source, "test.py")
    except SyntaxError as error:
        line = f"line {error.lineno}, {(error.text or '').strip()!r:.200}: " if error.lineno else ""
        raise RewardError(f"the statements of a test do not compile: {line}{error.msg}; correct the test.") from None
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise too_long(statements, f"{type(error).__name__} {error}") from None


def too_long(statements: str, problem: str = "RecursionError") -> RewardError:
    """Return the error of a test that is too deeply nested, or that cannot be read."""
    return RewardError(
        f"the statements of a test do not compile: {problem} in {statements!r:.200}; correct the test, or make it "
        "shorter."
    )


def _is_idle(statement: ast.stmt) -> bool:
    """Return whether a statement is known to run nothing that could fail because of the program."""
    match statement:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=value):  # a docstring
            return _is_constant(value)
        case ast.FunctionDef(decorator_list=decorators) | ast.AsyncFunctionDef(decorator_list=decorators):
            return _are_idle_decorators(decorators)
        case ast.ClassDef(decorator_list=decorators, body=body):
            return _are_idle_decorators(decorators) and all(map(_is_idle, body))
        case ast.Assign(value=value):
            return _is_constant(value)
        case ast.AnnAssign(value=value):
            return value is None or _is_constant(value)
        case ast.Pass():
            return True
    return False


def _is_constant(value: ast.expr) -> bool:
    return all(isinstance(part, _CONSTANT_PARTS) for part in ast.walk(value) if isinstance(part, ast.expr))


def _are_idle_decorators(decorators: Sequence[ast.expr]) -> bool:
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
