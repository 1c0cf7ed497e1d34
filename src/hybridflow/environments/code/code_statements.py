"""Checks of a test's statements before a program runs: they must compile, and something in them must run."""

import ast
import threading
import warnings
from collections.abc import Sequence
from functools import lru_cache

from hybridflow.errors import RewardError

_warnings_lock = threading.Lock()

_CONSTANT_PARTS = (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp)
_IDLE_DECORATORS = ("classmethod", "dataclass", "fixture", "parametrize", "property", "staticmethod")


@lru_cache(maxsize=4096)
def require_check(statements: str) -> None:
    """Raise RewardError for statements that do not compile, and for statements that every program passes.

    The latter only import, define functions and classes, and assign constants: nothing calls the program. A test `pass`
    says that the program has only to run.
    """
    module = _compiled(statements)
    if all(map(_is_idle, module.body)):
        raise RewardError(
            f"a test checks nothing, so every program would pass it: {statements!r:.200} only imports, defines or "
            f"assigns constants. {_fix(module.body)}"
        )


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
        raise RewardError(
            f"the statements of a test do not compile: {type(error).__name__} {error} in {statements!r:.200}; correct "
            "the test, or make it shorter."
        ) from None


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
            return _are_idle_decorators(decorators) and all(
                isinstance(each, ast.Pass) or _is_idle(each) for each in body
            )
        case ast.Assign(value=value):
            return _is_constant(value)
        case ast.AnnAssign(value=value):
            return value is None or _is_constant(value)
        case ast.If(test=test):  # the name is not __main__ there
            return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")
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
            return (
                "Run its class: `assert unittest.TextTestRunner().run(unittest.defaultTestLoader."
                f"loadTestsFromTestCase({statement.name})).wasSuccessful()`."
            )
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = "the function to test" if statement.args.args else ""
            return f"Call it: `{statement.name}({arguments})`."
    return "Add an assertion, as in `assert add(1, 2) == 3`."
