"""Verdicts of tests, and plain data on its way from a program's process to the scorer; beside code_process.py.

A value travels as JSON, whose lists begin with the letter of a type. Reading it executes nothing and makes only None,
bool, int, float, complex, str, bytes, Ellipsis, tuple, list, frozenset, dict, range, Fraction, Decimal, and `Opaque`
for every other object. A subclass arrives as its plain type.
"""

from __future__ import annotations

import sys
from _json import encode_basestring_ascii, make_encoder  # importing `json` would take longer than all else here

TYPE_CHECKING = False  # so would importing `typing`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PASSED, FAILED, IDLE = b"p", b"f", b"i"
"""Verdicts of a test; `IDLE`: nothing failed, and nothing was checked."""

MAX_DEPTH = 200
MAX_VALUES = 2**21
MAX_HASHED = 10_000
"""Members of sets and keys of dicts in a message, since a program may choose them so that their hashes are equal."""

_MAX_NUMBER_BYTES = 1000
"""Size of the parts of fractions and decimals, whose arithmetic takes more than linear time."""

_SAME = frozenset({type(None), bool, float, str})
_BYTES = ("B", lambda value: [bytes(memoryview(value)).hex()])
_SETS = (set, frozenset, type({}.keys()), type({}.items()))
_PARTS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("(", tuple.__iter__),
    list: ("[", list.__iter__),
    dict: (":", lambda value: [part for key in dict.__iter__(value) for part in (key, dict.__getitem__(value, key))]),
    **{kind: ("{", kind.__iter__) for kind in _SETS},
    complex: ("C", lambda value: [value.real, value.imag]),
    bytes: _BYTES,
    bytearray: _BYTES,
    type(...): (".", lambda value: []),
    range: ("r", lambda value: [value.start, value.stop, value.step]),
}
_write = make_encoder(None, str, encode_basestring_ascii, None, ":", ",", False, False, True)


class Opaque:
    """An object of the program that is not plain data: it equals nothing, and only its truth is known."""

    def __init__(self, truth: bool) -> None:
        self._truth = truth

    def __bool__(self) -> bool:
        return self._truth


def encode(value: Any) -> bytes:
    """Return the message of a value; raise what the value's class raises, or RecursionError beyond `MAX_DEPTH`."""
    return "".join(_write(described(value), 0)).encode()


def described(value: Any, others: list[Any] | None = None, is_own: Callable[[type], bool] | None = None) -> Any:
    """Return what JSON says of a value; collect its parts that are not plain data, or are of the test's own types."""

    def describe(value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _SAME:
            return value
        if depth > MAX_DEPTH:
            raise RecursionError("the value is nested too deeply")
        is_of_test = is_own is not None and is_own(kind)
        if not is_of_test:
            if isinstance(value, int):
                number = int.__index__(value)
                return number if abs(number) < 2**63 else ["I", hex(number)]
            if isinstance(value, float):
                return float.__pos__(value)
            if isinstance(value, str):
                return "".join(str.__iter__(value))
            for base, (tag, parts) in _PARTS.items():
                if isinstance(value, base):
                    return [tag, *[describe(part, depth + 1) for part in [*parts(value)]]]
            if kind is _type_of("fractions", "Fraction"):
                return ["/", describe(value.numerator, depth), describe(value.denominator, depth)]
            if kind is _type_of("decimal", "Decimal"):
                return ["e", str(value)]
        if others is not None:
            others.append(value)
        return ["O", is_of_test or bool(value)]

    return describe(value, 0)


def is_opaque(description: Any) -> bool:
    """Return whether this describes an object that is not plain data."""
    return type(description) is list and description[0] == "O"


def _type_of(module: str, name: str) -> type | None:
    """Return a type of a module; None if the program has not imported it, and so has no such value."""
    return getattr(sys.modules.get(module), name, None)


def decode(message: bytes, max_hashed: int = MAX_HASHED) -> Any:
    """Return the value of a message of a program; raise ValueError if it is not one, or is too large to compare."""
    import json

    if message.count(b",") + message.count(b"[") > MAX_VALUES:
        raise ValueError("the value has too many parts")
    try:
        return value_of(json.loads(message.decode("ascii")), max_hashed)
    except (TypeError, ArithmeticError, LookupError, RecursionError) as error:  # such as a list in a set
        raise ValueError(f"the message is not valid: {error}") from None


def value_of(description: Any, max_hashed: int) -> Any:
    """Return the value that JSON describes; raise ValueError or TypeError if there is none."""
    num_hashed = 0

    def value(described: Any, depth: int) -> Any:
        nonlocal num_hashed
        if type(described) is dict or depth > MAX_DEPTH:
            raise ValueError("the value is nested too deeply, or not in the form of one")
        if type(described) is not list:
            return described
        tag, *parts = described
        if tag in ("{", ":"):
            num_hashed += len(parts) if tag == "{" else len(parts) // 2
            if num_hashed > max_hashed:
                raise ValueError("sets and dicts have too many members")
        if tag not in _MAKING:
            raise ValueError(f"{tag!r} does not begin a value")
        return _MAKING[tag]([value(part, depth + 1) for part in parts])

    return value(description, 0)


def _range(parts: list[Any]) -> range:
    numbers = range(*parts)
    if len(numbers) > MAX_VALUES:
        raise ValueError("the range has too many numbers")  # `"a" in range(10**18)` would compare each of them
    return numbers


def _fraction(parts: list[Any]) -> Any:
    from fractions import Fraction

    if not all(type(part) is int and part.bit_length() <= 8 * _MAX_NUMBER_BYTES for part in parts):
        raise ValueError("a fraction has two integers of a limited size")
    return Fraction(*parts)


def _decimal(parts: list[Any]) -> Any:
    from decimal import Decimal

    (text,) = parts
    if type(text) is not str or len(text) > _MAX_NUMBER_BYTES:
        raise ValueError("a decimal is a text of a limited size")
    return Decimal(text)


_MAKING: dict[str, Callable[[list[Any]], Any]] = {
    ".": lambda parts: ...,
    "I": lambda parts: int(parts[0], 16),
    "C": lambda parts: complex(*parts),
    "B": lambda parts: bytes.fromhex(*parts),
    "O": lambda parts: Opaque(*parts),
    "(": tuple,
    "[": list,
    "{": frozenset,
    ":": lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "r": _range,
    "/": _fraction,
    "e": _decimal,
}
