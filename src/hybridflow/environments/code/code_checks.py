"""Tests by statements: the code that runs in the program's process, and the checks of values that come from there.

An assertion about one value of the program is *protected*: the program's process evaluates the value's expression
without seeing what is expected, and plain data comes back and is compared here. All other statements run in the
program's process, where the program can make them pass.
"""

import ast
import builtins
import copy
import marshal
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from hybridflow.environments.code.code_rewriter import call, imports_of, is_text, rewritten
from hybridflow.environments.code.code_statements import compiled, parsed, require_check, too_long
from hybridflow.environments.code.code_values import MAX_HASHED, decode

_FUNCTIONS = (abs, complex, dict, float, frozenset, int, len, list, max, min, round, set, sorted, str, sum, tuple)
_NAMES: dict[str, Any] = {each.__name__: each for each in _FUNCTIONS}
"""Functions that compute an expected value here."""

_MAX_FACTOR, _MAX_EXPONENT = 10**6, 1000
"""Limits of `[0] * n` and of `x ** n` in an expected value."""

_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError)
_BINARY = (ast.Add, ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)
_VALUE = ast.Name("__value__", ast.Load())
"""Stands in a check for the value that the program's process returns."""

_PLAIN_PARTS = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.Lambda, ast.keyword, ast.Call),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
"""Parts of an expression that neither compare nor combine a value of the program with one of the test."""


class _Unprotected(Exception):
    """A statement that must run in the program's process."""


@dataclass(frozen=True)
class Check:
    """An expression of the program's value, and the code of what must hold of it."""

    source: str
    code: CodeType
    max_hashed: int
    """Members of sets and dicts that the value may have; more than any expected one has."""

    def holds(self, answer: bytes) -> bool:
        """Return whether the check holds of the value of a message, which may be anything."""
        try:
            return bool(_evaluated(self.code, decode(answer, self.max_hashed)))
        except _ERRORS:
            return False


@dataclass(frozen=True)
class Steps:
    """A test: code for the program's process, and the checks of the values that it sends, in their order.

    Without checks it is not protected: the program can influence the verdict.
    """

    statements: str
    code: bytes
    checks: tuple[Check, ...] = ()
    imports: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Modules that the test imports, and names that it needs of them."""
    names_program: bool = True
    """Whether the test names anything that only a program defines."""


@lru_cache(maxsize=128)  # the steps of a test of 100 kB take 8 MB
def steps_of(statements: str) -> Steps:
    """Return the steps of a test. Raise RewardError if its statements do not compile, or contain no check."""
    module = parsed(statements)
    imports = tuple(imports_of(module))
    body = list(_inlined(module.body))
    names = _Names(body)
    sent: list[ast.stmt] = []
    checks: list[Check] = []
    try:
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                sent.append(statement)
            elif not is_text(statement):
                for subject, is_iterated, check in _checks_of(statement, names):
                    sent.append(ast.Expr(call("send", subject, ast.Constant(is_iterated))))
                    checks.append(check)
    except (_Unprotected, RecursionError):
        checks = []
    try:
        test = ast.Module(sent, []) if checks else rewritten(module)
        code = marshal.dumps(compiled(test, "exec"))
    except RecursionError:
        raise too_long(statements) from None
    if not checks:
        require_check(test, statements)
    return Steps(statements, code, tuple(checks), imports, bool(checks) or names.has_program)


def _inlined(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Replace the call of a function of the test that only asserts by its assertions, as in `check(add)`."""
    functions = {each.name: each for each in body if isinstance(each, ast.FunctionDef) and _only_asserts(each)}
    statements: list[ast.stmt] = []
    called: set[str] = set()
    for statement in body:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])) if name in functions:
                parameters = [each.arg for each in functions[name].args.args]
                if len(parameters) == len(args) and all(isinstance(each, ast.Name) for each in args):
                    values = dict(zip(parameters, args, strict=True))
                    statements += [_Renamed(values).visit(copy.deepcopy(each)) for each in functions[name].body]
                    called.add(name)
                    continue
        statements.append(statement)
    nodes = [node for each in statements for node in ast.walk(each)]
    read = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    if called & read:
        statements = body
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) if name in called - read:
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in read and _is_literal(value):
                continue  # METADATA = {...}
        yield statement


def _only_asserts(function: ast.FunctionDef) -> bool:
    parameters = function.args
    others = (parameters.vararg, parameters.kwarg, *parameters.posonlyargs, *parameters.kwonlyargs)
    if any(others) or parameters.defaults or function.decorator_list:
        return False
    return all(isinstance(each, ast.Assert) or is_text(each) for each in function.body)


class _Renamed(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (*_ERRORS, SyntaxError, MemoryError):
        return False
    return True


class _Names:
    """The names in a test that refer to objects of the program."""

    def __init__(self, body: list[ast.stmt]) -> None:
        nodes = [each for statement in body for each in ast.walk(statement)]
        imports = [each for each in nodes if isinstance(each, ast.Import | ast.ImportFrom)]
        self._bound: set[str] = {"program"}
        for each in nodes:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._bound.add(each.name)
            elif isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
                self._bound.add(each.id)
            elif isinstance(each, ast.arg):
                self._bound.add(each.arg)
        for each in imports:
            if getattr(each, "module", None) != "program":
                self._bound |= {alias.asname or alias.name.partition(".")[0] for alias in each.names}
        self.imports_isclose = "from math import isclose" in map(ast.unparse, imports)
        used = {each.id for each in nodes if isinstance(each, ast.Name)} - self._bound
        of_python = {name for name in used if hasattr(builtins, name)}
        imports_program = any(
            "program" in (getattr(each, "module", ""), *(alias.name for alias in each.names)) for each in imports
        )
        self.has_program = bool(used - of_python) or len(of_python) == 1 or imports_program
        self._tested = of_python if used == of_python and len(used) == 1 else set()  # assert sum(10, 15) == 150

    def is_of_program(self, name: str) -> bool:
        return name in self._tested or not (name in self._bound or hasattr(builtins, name))


def _checks_of(statement: ast.stmt, names: _Names) -> Iterator[tuple[ast.expr, bool, Check]]:
    """Yield an expression, whether its elements are asked for if it is not plain data, and the check of its value."""
    if not isinstance(statement, ast.Assert):
        raise _Unprotected
    conditions = [statement.test]
    while conditions:
        condition = conditions.pop(0)
        if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
            conditions = condition.values + conditions
        elif not (isinstance(condition, ast.Constant) and condition.value):  # assert True
            yield _Condition(names).check(condition)


class _Condition:
    """A condition on one value of the program."""

    def __init__(self, names: _Names) -> None:
        self._names = names
        self._subject: ast.expr | None = None
        self._has_truth_value = self._is_iterated = False

    def check(self, condition: ast.expr) -> tuple[ast.expr, bool, Check]:
        """Return the expression of the program's value, whether its elements are asked for, and the check."""
        check, subject = self._outer(condition), self._subject
        if subject is None or (self._has_truth_value and not self._is_called(subject)):
            raise _Unprotected
        size = max(MAX_HASHED, len(ast.unparse(condition)))
        return subject, self._is_iterated, Check(ast.unparse(subject), _code(check), size)

    def _outer(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self._outer(node.operand))
        if isinstance(node, ast.Compare):
            left, *others = [self._operand(each) for each in (node.left, *node.comparators)]
            self._is_iterated = isinstance(node.ops[-1], ast.In | ast.NotIn) and others == [_VALUE]
            return ast.Compare(left, node.ops, others)
        if isinstance(node, ast.Call) and self._is_isclose(node.func):
            keywords = [ast.keyword(each.arg, self._operand(each.value)) for each in node.keywords]
            return ast.Call(node.func, [self._operand(each) for each in node.args], keywords)
        self._has_truth_value = True
        return self._value(node)

    def _operand(self, node: ast.expr) -> ast.expr:
        if self._is_constant(node):
            try:
                self._has_truth_value |= isinstance(_evaluated(_code(node)), bool)
            except _ERRORS:
                raise _Unprotected from None
            return node
        match node:
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return ast.BinOp(self._operand(node.left), node.op, self._operand(node.right))
            case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp() as inner], keywords=[]):
                return ast.Call(node.func, [self._operand(inner)], [])
        return self._value(node)

    def _value(self, node: ast.expr) -> ast.expr:
        if self._subject is not None or not self._is_subject(node):
            raise _Unprotected
        self._subject = node
        return _VALUE

    def _is_isclose(self, function: ast.expr) -> bool:
        name = ast.unparse(function)
        return name == "math.isclose" or (name == "isclose" and self._names.imports_isclose)

    def _is_constant(self, node: ast.AST) -> bool:
        """Return whether an expression has only literals and functions that compute an expected value."""
        match node:
            case ast.Constant():
                return True
            case ast.Tuple() | ast.List() | ast.Set():
                return all(map(self._is_constant, node.elts))
            case ast.Dict():
                return all(each is not None and self._is_constant(each) for each in (*node.keys, *node.values))
            case ast.UnaryOp():
                return self._is_constant(node.operand)
            case ast.BinOp():
                return _is_small(node) and self._is_constant(node.left) and self._is_constant(node.right)
            case ast.Attribute(value=ast.Name(id="math"), attr=name):
                return name in ("pi", "e", "tau", "inf", "nan")
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                is_here = name in _NAMES and not self._names.is_of_program(name)
                return is_here and all(map(self._is_constant, args))
        return False

    def _is_subject(self, node: ast.expr) -> bool:
        """Return whether an expression has a value of the program, and gives the program nothing to compare it with."""
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        return any(map(self._names.is_of_program, names)) and self._is_plain(node)

    def _is_plain(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and self._is_called(node):
            return self._is_plain(node.func)  # arguments are what the program gets anyway
        if isinstance(node, ast.comprehension):
            return not node.ifs and self._is_plain(node.iter)
        if isinstance(node, ast.expr_context | ast.USub | ast.UAdd | ast.arguments | ast.arg):
            return True
        if isinstance(node, ast.Lambda):
            return self._is_plain(node.body)
        return isinstance(node, _PLAIN_PARTS) and all(map(self._is_plain, ast.iter_child_nodes(node)))

    def _is_called(self, node: ast.expr) -> bool:
        """Return whether an expression is a call of the program's function, or of a method of its object."""
        if not isinstance(node, ast.Call):
            return False
        root = node.func
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            is_attribute = isinstance(root, ast.Attribute)
            root = root.func if isinstance(root, ast.Call) else root.value
            if is_attribute and isinstance(root, ast.Name) and root.id in sys.stdlib_module_names:
                return False
        return isinstance(root, ast.Name) and self._names.is_of_program(root.id)


def _is_small(node: ast.BinOp) -> bool:
    """Return whether it takes neither long nor much memory to combine two expected values."""
    numbers = [getattr(getattr(each, "operand", each), "value", None) for each in (node.left, node.right)]
    if isinstance(node.op, ast.Pow):
        return isinstance(numbers[1], float) or _is_at_most(_MAX_EXPONENT, numbers[1])
    if not isinstance(node.op, ast.Mult):
        return isinstance(node.op, _BINARY)
    parts = [each for each in ast.walk(node) if isinstance(each, ast.List | ast.Tuple | ast.Call | ast.Constant)]
    is_repeated = any(not isinstance(getattr(each, "value", None), int | float | complex) for each in parts)
    return not is_repeated or any(_is_at_most(_MAX_FACTOR, number) for number in numbers)


def _is_at_most(limit: int, number: Any) -> bool:
    return isinstance(number, int) and number <= limit


def _code(check: ast.expr) -> CodeType:
    return compiled(ast.Expression(copy.deepcopy(check)), "eval")


def _evaluated(code: CodeType, value: Any = None) -> Any:
    return eval(code, {"__builtins__": _NAMES, "math": math, "isclose": math.isclose, _VALUE.id: value})
