"""The steps of a test by statements: what the program's process runs, and the comparisons made outside of it.

An assertion about one value of the program is *protected*: the program's process evaluates the value's expression
without seeing what is expected, and plain data comes back and is compared here. All other statements run in the
program's process, where the program can make them pass.
"""

import ast
import builtins
import copy
import marshal
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hybridflow.environments.code.code_rewriter import imports_of, rewritten
from hybridflow.environments.code.code_statements import parsed, require_check, too_long
from hybridflow.environments.code.code_values import MAX_HASHED, decode

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (abs, complex, dict, float, frozenset, int, len, list, max, min, round, set, sorted, str, sum, tuple)
}
"""Functions that compute an expected value here."""

_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_SUMS: dict[type, Callable[[Any, Any], Any]] = {ast.Add: operator.add, ast.Sub: operator.sub}
_BINARY = _SUMS | {
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_MAX_FACTOR, _MAX_EXPONENT = 10**6, 1000
"""Limits of `[0] * n` and of `x ** n` in an expected value."""

_PLAIN_PARTS = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.Lambda, ast.keyword, ast.Call),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
"""Parts of an expression that neither compare nor combine a value of the program with one of the test."""


class _Value(ast.expr):
    """Stands in a check for the value that the program's process returns."""


class _Unprotected(Exception):
    """A statement that must run in the program's process."""


@dataclass(frozen=True)
class Step:
    """An expression whose value is checked here, an import, or a whole test for the program's process."""

    source: str
    check: ast.expr | None = None
    """What must hold of the value; None for an import and a test."""
    is_iterated: bool = False
    """Whether the check asks for the elements of a value that is not plain data."""

    max_hashed: int = MAX_HASHED
    """Members of sets and dicts that the value may have; more than any expected one has."""

    code: bytes = b""
    """The rewritten test; empty for an expression and an import."""

    def holds(self, answer: bytes) -> bool:
        """Return whether the check holds of the value of a message, which may be anything."""
        try:
            return self.check is None or bool(_evaluate(self.check, decode(answer, self.max_hashed)))
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError):
            return False


@dataclass(frozen=True)
class Steps:
    """The steps of a test, and whether the program could influence its verdict."""

    steps: tuple[Step, ...]
    is_protected: bool
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
    steps: list[Step] = []
    try:
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                steps.append(Step(ast.unparse(statement)))
            elif not _is_text(statement):
                steps += _checks_of(statement, names)
    except (_Unprotected, RecursionError):
        steps = []
    if not any(step.check for step in steps):
        try:
            test = rewritten(module)
            code = compile(test, "test.py", "exec", dont_inherit=True, optimize=0)
        except RecursionError:
            raise too_long(statements) from None
        require_check(test, statements)
        return Steps((Step(statements, code=marshal.dumps(code)),), False, imports, names.has_program)
    return Steps(tuple(steps), True, imports)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _inlined(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Replace the call of a function of the test that only asserts by its assertions, as in `check(add)`."""
    functions = {each.name: each for each in body if isinstance(each, ast.FunctionDef) and _only_asserts(each)}
    calls: dict[int, list[ast.stmt]] = {}
    called: set[str] = set()
    for number, statement in enumerate(body):
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])) if name in functions:
                parameters = [each.arg for each in functions[name].args.args]
                if len(parameters) == len(args) and all(isinstance(each, ast.Name) for each in args):
                    values = dict(zip(parameters, args, strict=True))
                    calls[number] = [_Renamed(values).visit(copy.deepcopy(each)) for each in functions[name].body]
                    called.add(name)
    others = [each for number, each in enumerate(body) if number not in calls]
    read = {each.id for node in others for each in ast.walk(node) if isinstance(each, ast.Name) and _is_load(each)}
    if called & read:
        yield from body
        return
    for number, statement in enumerate(body):
        match statement:
            case ast.FunctionDef(name=name) if name in called:
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in read and _is_literal(value):
                continue  # METADATA = {...}
        yield from calls.get(number, [statement])


def _only_asserts(function: ast.FunctionDef) -> bool:
    parameters = function.args
    others = (parameters.vararg, parameters.kwarg, *parameters.posonlyargs, *parameters.kwonlyargs)
    if any(others) or parameters.defaults or function.decorator_list:
        return False
    return all(isinstance(each, ast.Assert) or _is_text(each) for each in function.body)


def _is_load(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


class _Renamed(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


class _Names:
    """Which names of a test mean objects of the program."""

    def __init__(self, body: list[ast.stmt]) -> None:
        nodes = [each for statement in body for each in ast.walk(statement)]
        self._bound: set[str] = {"program"}
        for each in nodes:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._bound.add(each.name)
            elif isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
                self._bound.add(each.id)
            elif isinstance(each, ast.arg):
                self._bound.add(each.arg)
            elif isinstance(each, ast.Import) or (isinstance(each, ast.ImportFrom) and each.module != "program"):
                self._bound |= {alias.asname or alias.name.partition(".")[0] for alias in each.names}
        self.imports_isclose = any(
            isinstance(each, ast.ImportFrom)
            and each.module == "math"
            and any(alias.name == "isclose" and not alias.asname for alias in each.names)
            for each in nodes
        )
        used = {each.id for each in nodes if isinstance(each, ast.Name)} - self._bound
        of_python = {name for name in used if hasattr(builtins, name)}
        self.has_program = bool(used - of_python) or len(of_python) == 1 or _imports_program(nodes)
        self._tested = of_python if used == of_python and len(used) == 1 else set()  # assert sum(10, 15) == 150

    def is_of_program(self, name: str) -> bool:
        return name in self._tested or not (name in self._bound or hasattr(builtins, name))


def _imports_program(nodes: list[ast.AST]) -> bool:
    return any(getattr(node, "module", getattr(node, "name", None)) == "program" for node in nodes)


def _checks_of(statement: ast.stmt, names: _Names) -> Iterator[Step]:
    if not isinstance(statement, ast.Assert):
        raise _Unprotected
    conditions = [statement.test]
    while conditions:
        condition = conditions.pop(0)
        if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
            conditions = condition.values + conditions
        elif not (isinstance(condition, ast.Constant) and condition.value):  # assert True
            yield _Condition(names).step(condition)


class _Condition:
    """A condition on one value of the program."""

    def __init__(self, names: _Names) -> None:
        self._names = names
        self._subject: ast.expr | None = None
        self._has_truth_value = self._is_iterated = False

    def step(self, condition: ast.expr) -> Step:
        """Return the step that evaluates the program's value and checks the condition."""
        check = self._outer(condition)
        if self._subject is None or (self._has_truth_value and not self._is_called(self._subject)):
            raise _Unprotected
        source = ast.unparse(self._subject)
        return Step(source, check, self._is_iterated, max(MAX_HASHED, len(ast.unparse(condition))))

    def _outer(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self._outer(node.operand))
        if isinstance(node, ast.Compare):
            operands = [self._operand(each) for each in (node.left, *node.comparators)]
            is_last_in = isinstance(node.ops[-1], ast.In | ast.NotIn)
            self._is_iterated = is_last_in and len(node.ops) == 1 and isinstance(operands[-1], _Value)
            return ast.Compare(operands[0], node.ops, operands[1:])
        if isinstance(node, ast.Call) and self._is_isclose(node.func):
            keywords = [ast.keyword(each.arg, self._operand(each.value)) for each in node.keywords]
            return ast.Call(ast.Name("isclose"), [self._operand(each) for each in node.args], keywords)
        self._has_truth_value = True
        return self._value(node)

    def _operand(self, node: ast.expr) -> ast.expr:
        if self._is_constant(node):
            try:
                value = _evaluate(node, None)
            except (TypeError, ValueError, ArithmeticError, LookupError):
                raise _Unprotected from None
            self._has_truth_value |= isinstance(value, bool)
            return node
        if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
            return ast.BinOp(self._operand(node.left), node.op, self._operand(node.right))
        match node:
            case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp() as inner], keywords=[]):
                return ast.Call(ast.Name("abs"), [self._operand(inner)], [])
        return self._value(node)

    def _value(self, node: ast.expr) -> ast.expr:
        if self._subject is not None or not self._is_subject(node):
            raise _Unprotected
        self._subject = node
        return _Value()

    def _is_isclose(self, function: ast.expr) -> bool:
        match function:
            case ast.Attribute(value=ast.Name(id="math"), attr="isclose"):
                return True
            case ast.Name(id="isclose"):
                return self._names.imports_isclose
        return False

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
                return type(node.op) in _BINARY and self._is_constant(node.left) and self._is_constant(node.right)
            case ast.Attribute(value=ast.Name(id="math"), attr=name):
                return name in ("pi", "e", "tau", "inf", "nan")
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                is_here = name in _FUNCTIONS and not self._names.is_of_program(name)
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


def _evaluate(node: ast.AST | None, value: Any) -> Any:
    """Return the value of a check's expression, in which `_Value` is the value of the program."""
    match node:
        case _Value():
            return value
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(_evaluate(each, value) for each in node.elts)
        case ast.List():
            return [_evaluate(each, value) for each in node.elts]
        case ast.Set():
            return {_evaluate(each, value) for each in node.elts}
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {_evaluate(key, value): _evaluate(each, value) for key, each in pairs}
        case ast.UnaryOp():
            return _UNARY[type(node.op)](_evaluate(node.operand, value))
        case ast.BinOp():
            return _combined(node.op, _evaluate(node.left, value), _evaluate(node.right, value))
        case ast.Attribute():
            return getattr(math, node.attr)
        case ast.Compare():
            left = _evaluate(node.left, value)
            for comparison, comparator in zip(node.ops, node.comparators, strict=True):
                right = _evaluate(comparator, value)
                if not _COMPARISONS[type(comparison)](left, right):
                    return False
                left = right
            return True
        case ast.Call(func=ast.Name(id=name)):
            function = math.isclose if name == "isclose" else _FUNCTIONS[name]
            keywords = {str(each.arg): _evaluate(each.value, value) for each in node.keywords}
            return function(*[_evaluate(each, value) for each in node.args], **keywords)
    raise TypeError(f"{type(node).__name__} is not part of a check")


def _combined(operation: ast.operator, left: Any, right: Any) -> Any:
    sizes = [abs(each) for each in (left, right) if isinstance(each, int)]
    if isinstance(operation, ast.Pow) and isinstance(right, int) and abs(right) > _MAX_EXPONENT:
        raise ValueError(f"an exponent is larger than {_MAX_EXPONENT}")
    is_repeated = isinstance(operation, ast.Mult) and len(sizes) == 1 and not isinstance(left, float | complex)
    if is_repeated and not isinstance(right, float | complex) and sizes[0] > _MAX_FACTOR:
        raise ValueError(f"a factor is larger than {_MAX_FACTOR}")
    return _BINARY[type(operation)](left, right)
