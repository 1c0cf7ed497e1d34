"""Draws faults for the package's source: each replaces one expression by a wrong one. Runs no test.

The expressions are those inside functions; f-strings and annotations are left alone, and so are the operands of a
logged message. Faults are drawn over the packages in proportion to their lines, and over the kinds in equal parts.
"""

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
JOINED = {ast.And: ast.Or, ast.Or: ast.And}


@dataclass(frozen=True)
class Fault:
    """One expression of a file and the wrong one that takes its place; lines from 1, columns in bytes from 0."""

    path: str
    kind: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    def replace(self, text: str, expression: str) -> str:
        """Return the file's text with `expression` in place of this fault's."""
        lines = text.encode().split(b"\n")
        head = b"\n".join([*lines[: self.line - 1], lines[self.line - 1][: self.column]])
        tail = b"\n".join([lines[self.end_line - 1][self.end_column :], *lines[self.end_line :]])
        if f"{head.decode()}{self.before}{tail.decode()}" != text:
            raise ValueError(
                f"{self.path}:{self.line} is not {self.before!r}: the fault was drawn for another version."
            )
        return f"{head.decode()}{expression}{tail.decode()}"

    def as_dict(self) -> dict[str, str | int]:
        """Return the fault as JSON types."""
        return asdict(self)


def draw_faults(source: Path, *, count: int, seed: int, only: tuple[str, ...] = ()) -> list[Fault]:
    """Return `count` faults for the Python files of `source`, drawn with `seed`; equal arguments give equal faults.

    With `only`, they are in these packages.
    """
    draw = random.Random(seed)
    packages: dict[str, list[Path]] = {}
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        if relative.parts[0] not in ("examples", "recipes") and (not only or relative.parts[0] in only):
            packages.setdefault(relative.parts[0], []).append(path)
    lines = [sum(len(path.read_text().splitlines()) for path in paths) for paths in packages.values()]
    faults: list[Fault] = []
    limit, rejected = 1, 0  # faults of one file; more only if there are too few files
    possible: dict[str, dict[str, list[Fault]]] = {}
    while len(faults) < count:
        (name,) = draw.choices(list(packages), lines)
        if name not in possible:
            kinds = possible[name] = {}
            for path in packages[name]:
                for fault in faults_of(path.read_text(), str(path.relative_to(source))):
                    kinds.setdefault(fault.kind, []).append(fault)
        if kinds := possible[name]:
            fault = draw.choice(kinds[draw.choice(sorted(kinds))])
            if [one.path for one in faults].count(fault.path) < limit and fault not in faults:
                faults.append(fault)
                rejected = 0
            else:
                rejected += 1
                limit += rejected % 100 == 0
    return sorted(faults, key=lambda fault: (fault.path, fault.line))


def faults_of(text: str, path: str) -> list[Fault]:
    """Return every fault that can be planted in a file."""
    faults, lines = [], text.encode().split(b"\n")
    for node in _inside_functions(ast.parse(text)):
        for kind, target, wrong in _wrong_forms(node):
            start, end, last = target.lineno, target.end_lineno or 0, target.end_col_offset or 0
            segment = [*lines[start - 1 : end - 1], lines[end - 1][:last]]
            segment[0] = segment[0][target.col_offset :]
            before = b"\n".join(segment).decode()
            faults.append(Fault(path, kind, start, target.col_offset, end, last, before, f"({ast.unparse(wrong)})"))
    return faults


def _inside_functions(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr | ast.arguments) or _is_logged(node):
            continue
        if isinstance(node, ast.AnnAssign):
            if inside and node.value is not None:
                yield from _inside_functions(ast.Expression(node.value), inside)
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _inside_functions(ast.Module(node.body, []), True)
            continue
        if inside:
            yield node
        yield from _inside_functions(node, inside)


def _is_logged(node: ast.AST) -> bool:
    match node:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("logger" | "log" | "warnings"), _), _, _)) | ast.Raise():
            return True
    return False


def _wrong_forms(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Yield (kind, expression, wrong expression) for one node."""
    match node:
        case ast.Compare(left, [operator], [right]):
            yield "comparison", node, ast.Compare(left, [COMPARED[type(operator)]()], [right])
        case ast.BinOp(left, operator, right) if type(operator) in COMPUTED and not (_is_text(left) or _is_text(right)):
            yield "arithmetic", node, ast.BinOp(left, COMPUTED[type(operator)](), right)
        case ast.UnaryOp(ast.USub() | ast.Not(), operand):
            yield "sign", node, operand
        case ast.BoolOp(operator, values):
            yield "condition", node, ast.BoolOp(JOINED[type(operator)](), values)
        case ast.Subscript(_, index, ast.Load()):
            for number in [one for one in ast.walk(index) if _is_index(one)][:1]:
                yield "index", number, ast.BinOp(number, ast.Add(), ast.Constant(1))
        case ast.Call(ast.Name("range"), [*_, stop], _):
            yield "index", stop, ast.BinOp(stop, ast.Sub(), ast.Constant(1))
        case ast.Call(_, [first, second, *others], _) if not any(isinstance(one, ast.Starred) for one in node.args):
            swapped = copy.copy(node)
            swapped.args = [second, first, *others]
            yield "arguments", node, swapped
        case ast.Expr(ast.Call() | ast.Await()):
            yield "call", node.value, ast.Constant(None)
        case ast.If(test, [*_, ast.Raise()], []):
            yield "check", test, ast.Constant(False)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_index(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int
