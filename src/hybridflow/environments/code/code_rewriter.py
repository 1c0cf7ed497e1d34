"""Rewrites a test by statements, so that code_judge.py compares, counts and records what its checks find.

| statement or expression of the test | becomes |
|---|---|
| `assert a == b, text` | `if not __check__(__compare__(("Eq",), True, a, b)): raise __failed__(text)` |
| `if a != b: raise X` | `__count__()` where its block begins, `raise __raised__(X)` in it |
| `except E:` | `except E: __caught__()` |
| `abs(a - b)`, other `a - b` | `__distance__(abs, a, b)`, `__difference__(a, b)` |
| `sys.exit(status)` | `raise __ended__(status)` |
"""

import ast
import sys
from typing import Any

_SWALLOWING = ("AssertionError", "Exception", "BaseException")
_EXITS = ("sys.exit", "exit", "quit")
_RESULTS = ("attempted", "errors", "failed", "failures", "testsRun", "wasSuccessful")
"""Attributes of a test runner's results; the checks are the tests that it ran."""


def rewritten(module: ast.Module) -> ast.Module:
    """Rewrite a module that compiles; raise RecursionError if it is nested too deeply."""
    return _Rewriter(module).visit(module)


def is_check(node: ast.AST) -> bool:
    """Return whether a part of a rewritten test is a check."""
    match node:
        case ast.Call(func=ast.Name(id="__check__" | "__count__")):
            return True
        case ast.Call(func=ast.Attribute(attr=name)):
            return name.startswith(("assert", "fail", "testmod", "run_docstring", "DocTest"))
    return False


def imports_of(module: ast.Module) -> list[tuple[str, tuple[str, ...]]]:
    """Return the modules of the standard library that a test imports, and the names that it needs of each."""
    imports: list[tuple[str, tuple[str, ...]]] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            imports += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports.append((node.module, tuple(alias.name for alias in node.names if alias.name != "*")))
        elif isinstance(node, ast.Attribute) and node.attr == "IsolatedAsyncioTestCase":  # which unittest loads late
            imports.append(("unittest", (node.attr,)))
    return [each for each in imports if each[0].partition(".")[0] in sys.stdlib_module_names - {"antigravity", "this"}]


class _Assertion(ast.If):
    """An assertion, rewritten."""


class _Rewriter(ast.NodeTransformer):
    def __init__(self, module: ast.Module) -> None:
        self._is_swallowed = False
        has_runner = any(name in ("unittest", "doctest") for name, _ in imports_of(module))
        self._results = set(_RESULTS if has_runner else ())
        for node in ast.walk(module):
            if isinstance(node, ast.Assign) and self._is_of_runner(node.value):
                self._results |= {each.id for each in node.targets if isinstance(each, ast.Name)}

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Rewrite the parts of a node, and count on entering a block that can fail in another way than by `assert`."""
        super().generic_visit(node)
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            _mark_conditions(node.test)
            if self._is_of_runner(node.test):
                return node
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and not isinstance(node, ast.ClassDef):
                self._count_in(block)
        return node

    def _count_in(self, block: list[ast.stmt]) -> None:
        if not self._is_swallowed and any(map(self._can_fail, block)):
            is_first = (is_text(each) or getattr(each, "module", "") == "__future__" for each in block)
            block.insert([*is_first, False].index(False), ast.Expr(call("count")))

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        self.generic_visit(node)
        condition, raising = node.test, ast.Raise(call("failed", *filter(None, [node.msg])))
        if isinstance(condition, ast.Constant) and not condition.value:
            return raising
        _mark_conditions(condition)
        if not (self._is_swallowed or self._is_no_check(condition)):
            condition = call("check", condition)
        return _Assertion(ast.UnaryOp(ast.Not(), condition), [raising], [])

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        operations = ast.Tuple([ast.Constant(type(each).__name__) for each in node.ops], ast.Load())
        return call("compare", operations, ast.Constant(False), node.left, *node.comparators)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return call("difference", node.left, node.right) if isinstance(node.op, ast.Sub) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)], keywords=[]):
                return call("distance", node.func, self.visit(left), self.visit(right))
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        match node.value:
            case ast.Call(args=args) if _is_exit(node.value):
                return ast.Raise(call("ended", *map(self.visit, args)))
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        self.generic_visit(node)
        node.exc = node.exc and call("raised", node.exc)
        return node

    def visit_Try(self, node: Any) -> ast.stmt:
        """Rewrite a statement; what fails in its body and is caught there without consequence is not a check."""
        was_swallowed = self._is_swallowed
        self._is_swallowed |= any(map(_swallows, node.handlers))
        for block in (node.body, node.orelse, node.finalbody):
            block[:] = list(map(self.visit, block))
            self._count_in(block)
            self._is_swallowed = was_swallowed
        for handler in node.handlers:
            self.generic_visit(handler)
            handler.body.insert(0, ast.Expr(call("caught")))
        return node

    visit_TryStar = visit_Try

    def _is_no_check(self, condition: ast.expr) -> bool:
        """Return whether a condition is the result of a runner, whose checks count where they run, or always holds."""
        match condition:
            case ast.Tuple(elts=[_, *_]):  # assert (f(2) == 4, "wrong")
                return True
            case ast.BoolOp(op=ast.Or(), values=values) if any(getattr(each, "value", None) is True for each in values):
                return True
        names = [each.id for each in ast.walk(condition) if isinstance(each, ast.Name)]
        return all(name.startswith("__") for name in names) or self._is_of_runner(condition)

    def _is_of_runner(self, condition: ast.expr) -> bool:
        names = {getattr(each, "attr", getattr(each, "id", None)) for each in ast.walk(condition)}
        return not self._results.isdisjoint(names)

    def _can_fail(self, statement: ast.stmt) -> bool:
        """Return whether a statement raises, on a condition of the program, without an assertion that is counted."""
        blocks: list[list[ast.stmt]] = []
        match statement:
            case _Assertion() | ast.Raise(exc=None):
                return False
            case ast.Raise(exc=ast.Call(func=ast.Name(id="__ended__"), args=[] | [ast.Constant(value=None | 0)])):
                return False
            case ast.Raise(exc=ast.expr() as error):
                return not self._is_of_runner(error)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="fail"))):
                return True
            case ast.If(test=test) if not self._is_no_check(test):
                blocks = [statement.body, statement.orelse]
            case ast.Match():
                blocks = [case.body for case in statement.cases]
            case ast.Try():
                is_swallowed = any(map(_swallows, statement.handlers))
                blocks = [statement.orelse, [] if is_swallowed else statement.body]
        return any(self._can_fail(each) for block in blocks for each in block)


def call(name: str, *args: ast.expr) -> ast.Call:
    """Return a call of a function of the judge."""
    return ast.Call(ast.Name(f"__{name}__", ast.Load()), list(args), [])


def _mark_conditions(node: ast.expr) -> None:
    """Have comparisons give True or False, where nothing but their truth matters."""
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _mark_conditions(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _mark_conditions(operand)
        case ast.Call(func=ast.Name(id="__compare__"), args=args):
            args[1] = ast.Constant(True)


def is_text(node: ast.AST) -> bool:
    """Return whether a statement is a constant, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_exit(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in _EXITS


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches a failed assertion and does nothing that could matter later."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    is_general = any(kind is None or getattr(kind, "id", getattr(kind, "attr", None)) in _SWALLOWING for kind in kinds)
    return is_general and not any(
        isinstance(each, ast.Raise | ast.Assert) or _is_exit(each) for each in ast.walk(handler)
    )
