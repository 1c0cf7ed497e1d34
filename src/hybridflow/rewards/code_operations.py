"""Operations on objects that one end of the exchange between the judge and the program asks the other end for."""

from __future__ import annotations

import _operator as operator
import sys
from types import new_class

from code_values import PLAIN_TYPES  # beside this file

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _parts_of(value: Any) -> Any:
    """Return the data of an object whose class derives from a plain type; parts of containers as a tuple."""
    kind: Any = base_of(type(value))
    if kind is dict:
        ordered = sys.modules.get("collections")
        order: Any = ordered.OrderedDict if ordered is not None and isinstance(value, ordered.OrderedDict) else dict
        return tuple((key, dict.__getitem__(value, key)) for key in order.__iter__(value))
    if kind is bytearray:
        return bytes(value)
    if issubclass(kind, list | set | tuple | frozenset):
        return tuple(kind.__iter__(value))
    if kind is str:
        return "".join(str.__iter__(value))
    return kind.__getitem__(value, slice(None)) if kind is bytes else kind.__pos__(value)


def base_of(kind: type) -> type:
    """Return the plain type that a class derives from."""
    return next(each for each in PLAIN_TYPES if issubclass(kind, each))


def made_of(kind: type, parts: Any) -> Any:
    """Return plain data of a type, made of the parts that the operation `plain` returns; TypeError for other parts."""
    base = base_of(kind)
    is_container = issubclass(base, list | set | tuple | frozenset | dict)
    if type(parts) is not (tuple if is_container else bytes if base is bytearray else base):
        raise TypeError(f"the data of a {kind.__name__} is not a {type(parts).__name__}")
    data = base(parts)
    return kind(data) if kind.__name__ in ("Counter", "OrderedDict") else data


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
_IN_PLACE = tuple(f"i{name}" for name in (*_NUMERIC, *_BITWISE, "and", "or", "pow"))
ARITHMETIC = (*_NUMERIC, *_BITWISE, "and", "or", "pow", "divmod")

READING = frozenset((*ARITHMETIC, *_IN_PLACE, *_COMPARISONS, "plain"))
"""Operations that get operands of the statements; data that a mutable object has afterwards is not read for them."""

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
    "plain": _parts_of,
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
    "divmod": divmod,
    "and": operator.and_,
    "or": operator.or_,
    **{name: getattr(operator, name) for name in (*_ACCESS, *_UNARY, *_COMPARISONS, *_NUMERIC, *_BITWISE, *_IN_PLACE)},
}
"""What one end may ask the other to do with its objects."""
