"""Operations on objects that one end of the exchange between the judge and the program asks the other end for."""

from __future__ import annotations

import _operator as operator
from types import new_class

from code_values import PLAIN_TYPES, fill  # pyright: ignore[reportMissingImports]  # beside this file

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _plain_data(value: Any) -> Any:
    """Return the data of an object whose class derives from a plain type."""
    kind: Any
    for kind in PLAIN_TYPES:
        if isinstance(value, kind):
            if issubclass(kind, list | set | dict):
                data = kind()
                pairs = dict.items(value) if kind is dict else ()
                fill(data, [part for pair in pairs for part in pair] if kind is dict else kind.__iter__(value))
                return data
            if issubclass(kind, tuple | frozenset):
                return kind(kind.__iter__(value))
            if issubclass(kind, str | bytes | bytearray):
                return kind.__getitem__(value, slice(None)) if kind is not str else "".join(str.__iter__(value))
            return kind.__pos__(value)
    raise TypeError(f"{type(value).__name__} does not derive from a plain type")


def _run(coroutine: Any) -> Any:
    import asyncio  # takes long

    return asyncio.run(coroutine)


def members_of(namespace: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """Return the members of a class as (name, name of a decorator or "", values), for the operation `derive`."""
    members = []
    for name, value in namespace.items():
        kind = type(value).__name__
        if type(value) is property:
            members.append((name, kind, value.fget, value.fset, value.fdel, value.__doc__))
        elif type(value) in (staticmethod, classmethod):
            members.append((name, kind, value.__func__))
        elif name != "__classcell__":
            members.append((name, "", value))
    return tuple(members)


def _derive(name: str, bases: tuple[type, ...], members: tuple[tuple[Any, ...], ...]) -> type:
    decorators = {"property": property, "staticmethod": staticmethod, "classmethod": classmethod}
    namespace = {key: decorators[kind](*values) if kind else values[0] for key, kind, *values in members}
    return new_class(name, bases, exec_body=lambda body: body.update(namespace))


_ACCESS = ("getitem", "setitem", "delitem")
_UNARY = ("index", "abs", "neg", "pos", "inv")
_COMPARISONS = ("eq", "lt", "le", "gt", "ge")
_NUMERIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul")
_BITWISE = ("xor", "lshift", "rshift")
ARITHMETIC = (*_NUMERIC, *_BITWISE, "and", "or", "pow")

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, args, kwargs: function(*args, **dict(kwargs)),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager, kind, error: bool(type(manager).__exit__(manager, kind, error, None)),
    "derive": _derive,
    "super": lambda kind, instance, name: getattr(super(kind, instance), name),
    "send": lambda generator, value: generator.send(value),
    "run": _run,
    "plain": _plain_data,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "format": format,
    "hash": hash,
    "int": int,
    "float": float,
    "complex": complex,
    "round": round,
    "reversed": reversed,
    "copy": lambda value: __import__("copy").copy(value),
    "deepcopy": lambda value: __import__("copy").deepcopy(value),
    "pow": pow,
    "and": operator.and_,
    "or": operator.or_,
    **{name: getattr(operator, name) for name in (*_ACCESS, *_UNARY, *_COMPARISONS, *_NUMERIC, *_BITWISE)},
}
"""What one end may ask the other to do with its objects."""
