"""Verdicts of tests, and the encoding of plain data from a program's process to the scorer; beside code_process.py.

Decoding executes nothing and makes only None, bool, int, float, complex, str, bytes, Ellipsis, tuple, list, frozenset,
dict, range, Fraction, Decimal, and `Opaque` for every other object. A subclass arrives as its plain type.
"""

from __future__ import annotations

import struct
import sys

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
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

_COUNT, _INT, _FLOAT, _COMPLEX = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<dd")
_SETS = (set, frozenset, type({}.keys()), type({}.items()))


class Opaque:
    """An object of the program that is not plain data: it equals nothing, and only its truth is known."""

    def __init__(self, truth: bool) -> None:
        self._truth = truth

    def __bool__(self) -> bool:
        return self._truth


def encode(value: Any) -> bytes:
    """Return the message of a value; raise what the value's class raises, or RecursionError beyond `MAX_DEPTH`."""
    out = bytearray()
    _put(out, value, 0)
    return bytes(out)


def _put(out: bytearray, value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RecursionError("the value is nested too deeply")
    if value is None or value is ... or value is True or value is False:
        out += {None: b"N", ...: b".", True: b"T", False: b"F"}[value]
    elif isinstance(value, int):
        _put_int(out, int.__index__(value))
    elif isinstance(value, float):
        out += b"D" + _FLOAT.pack(float.__pos__(value))
    elif isinstance(value, complex):
        out += b"C" + _COMPLEX.pack(value.real, value.imag)
    elif isinstance(value, str):
        _put_sized(out, b"S", "".join(str.__iter__(value)).encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        _put_sized(out, b"B", bytes(memoryview(value)))
    elif isinstance(value, tuple):
        _put_items(out, b"(", [*tuple.__iter__(value)], depth)
    elif isinstance(value, list):
        _put_items(out, b"[", [*list.__iter__(value)], depth)
    elif isinstance(value, _SETS):
        kind: Any = next(each for each in _SETS if isinstance(value, each))
        _put_items(out, b"{", [*kind.__iter__(value)], depth)
    elif isinstance(value, dict):
        keys = [*dict.__iter__(value)]
        _put_items(out, b":", [part for key in keys for part in (key, dict.__getitem__(value, key))], depth)
    elif type(value) is range:
        _put_items(out, b"r", [value.start, value.stop, value.step], depth)
    elif type(value) is _type_of("fractions", "Fraction"):
        _put_items(out, b"/", [value.numerator, value.denominator], depth)
    elif type(value) is _type_of("decimal", "Decimal"):
        _put_items(out, b"e", [str(value)], depth)
    else:
        out += b"O" + (b"T" if value else b"F")


def _type_of(module: str, name: str) -> type | None:
    """Return a type of a module; None if the program has not imported it, and so has no such value."""
    return getattr(sys.modules.get(module), name, None)


def _put_int(out: bytearray, value: int) -> None:
    if -(2**63) <= value < 2**63:
        out += b"q" + _INT.pack(value)
    else:
        _put_sized(out, b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _put_sized(out: bytearray, tag: bytes, contents: bytes) -> None:
    out += tag + _COUNT.pack(len(contents))
    out += contents


def _put_items(out: bytearray, tag: bytes, items: list[Any], depth: int) -> None:
    out += tag + _COUNT.pack(len(items))
    for item in items:
        _put(out, item, depth + 1)


def decode(message: bytes, max_hashed: int = MAX_HASHED) -> Any:
    """Return the value of a message of a program; raise ValueError if it is not one, or is too large to compare."""
    try:
        reader = _Reader(message, max_hashed)
        value = reader.take(0)
    except (TypeError, ArithmeticError, struct.error) as error:  # such as a list in a set
        raise ValueError(f"the message is not valid: {error}") from None
    if not reader.is_at_end:
        raise ValueError("the message is too long")
    return value


class _Reader:
    def __init__(self, message: bytes, max_hashed: int) -> None:
        self._message, self._at = message, 0
        self._num_values, self._num_hashed, self._max_hashed = 0, 0, max_hashed

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._message)

    def take(self, depth: int) -> Any:
        """Return the next value."""
        self._num_values += 1
        if depth > MAX_DEPTH or self._num_values > MAX_VALUES:
            raise ValueError("the value is nested too deeply, or has too many parts")
        tag = self._bytes(1)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _FIXED:
            layout, make = _FIXED[tag]
            return make(*layout.unpack(self._bytes(layout.size)))
        if tag in _SIZED:
            return _SIZED[tag](self._bytes(self._count()))
        if tag in _COLLECTIONS:
            return self._collection(tag, depth)
        raise ValueError(f"{tag!r} does not begin a value")

    def _collection(self, tag: bytes, depth: int) -> Any:
        count = self._count()
        if count > MAX_VALUES:
            raise ValueError("the value has too many parts")
        if tag in (b"{", b":"):
            self._num_hashed += count if tag == b"{" else count // 2
            if self._num_hashed > self._max_hashed:
                raise ValueError("sets and dicts have too many members")
        return _COLLECTIONS[tag]([self.take(depth + 1) for _ in range(count)])

    def _bytes(self, length: int) -> bytes:
        start, self._at = self._at, self._at + length
        if self._at > len(self._message):
            raise ValueError("the message is too short")
        return self._message[start : self._at]

    def _count(self) -> int:
        return _COUNT.unpack(self._bytes(4))[0]


def _range(parts: list[Any]) -> range:
    value = range(*parts)
    if len(value) > MAX_VALUES:  # `"a" in range(10**18)` would compare each number, and no signal stops it
        raise ValueError("the range has too many numbers")
    return value


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


_CONSTANTS = {b"N": None, b".": ..., b"T": True, b"F": False}
_FIXED: dict[bytes, tuple[struct.Struct, Callable[..., Any]]] = {
    b"q": (_INT, int),
    b"D": (_FLOAT, float),
    b"C": (_COMPLEX, complex),
    b"O": (struct.Struct("c"), lambda truth: Opaque(truth == b"T")),
}
_SIZED: dict[bytes, Callable[[bytes], Any]] = {
    b"I": lambda contents: int.from_bytes(contents, "little", signed=True),
    b"S": lambda contents: contents.decode("utf-8", "surrogatepass"),
    b"B": bytes,
}
_COLLECTIONS: dict[bytes, Callable[[list[Any]], Any]] = {
    b"(": tuple,
    b"[": list,
    b"{": frozenset,
    b":": lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    b"r": _range,
    b"/": _fraction,
    b"e": _decimal,
}
